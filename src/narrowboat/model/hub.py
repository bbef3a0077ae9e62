"""The model hub: files of a model fetched into the hub's own cache, and an adapter's folder uploaded."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from narrowboat.errors import MachineError


def fetch(name: str, revision: str = "") -> Path:
    """The folder with the files of the hub's model ``name``, at ``revision`` if one is named.

    Raises:
        OSError, ValueError: it cannot be fetched.
    """
    return Path(
        snapshot_download(name, revision=revision or None, ignore_patterns=["*.gguf", "*.bin", "*.pt", "*.pth"])
    )


def upload(folder: Path, name: str, private: bool) -> str:
    """Upload the files of ``folder`` to the hub's repository ``name``, which is made if it is not there; its address.

    Raises:
        MachineError: the hub cannot be reached, there is no token, or the hub refuses.
    """
    if HF_HUB_OFFLINE:
        raise MachineError("HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it and push again.")
    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, ignore_patterns=[".*"])
    except LocalTokenNotFoundError:
        raise MachineError("There is no token for the hub here. Run hf auth login, or set HF_TOKEN.") from None
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code == 401:
            raise MachineError("The hub refuses the token. Run hf auth login, or set HF_TOKEN.") from None
        raise MachineError(f"The hub refuses {name}: {str(error).splitlines()[0]}") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise MachineError(f"The hub cannot be reached: {str(error).splitlines()[0][:200]}") from None
    return str(address)
