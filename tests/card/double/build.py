"""Builds the double of a card: a stand-in for the CUDA runtime, against the CUDA build of torch that is installed here.

    python tests/card/double/build.py FOLDER        prints the environment in which torch sees the card

What the stand-in has to know is in ``runtime.c``. Whatever else torch's libraries link to by name (hundreds of
functions of cuBLAS, cuSOLVER and the like) does nothing and says that it succeeded; their names are read from the
libraries themselves, so another version of torch needs no other list.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so")
NAMES = re.compile(r"^(cuda|cublas|cusolver|cusparse|cufft|curand|cudnn|nvrtc|cusparseLt)[A-Z]\w*$")


def build(folder: Path) -> dict[str, str]:
    """Compile into ``folder``; the environment that loads it."""
    import torch  # not needed to be imported, only to be found

    site = Path(torch.__file__).parent
    headers = next(site.parent.glob("nvidia/*/include/cuda_runtime_api.h")).parent
    folder.mkdir(parents=True, exist_ok=True)
    known = set(re.findall(r"\b(cu\w+)\(", (HERE / "runtime.c").read_text(encoding="utf-8")))
    stubs = sorted(_undefined(site / "lib") - known)
    (folder / "stubs.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in stubs), encoding="utf-8")
    compile_ = ["gcc", "-shared", "-fPIC", "-w", "-O1", f"-I{headers}", f"-I{HERE}"]
    card = folder / "card.so"
    subprocess.run([*compile_, HERE / "runtime.c", folder / "stubs.c", "-ldl", "-o", card], check=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        subprocess.run([*compile_, HERE / "driver.c", f"-Wl,-soname,{name}", "-o", folder / name], check=True)
    return {"LD_PRELOAD": str(card), "LD_LIBRARY_PATH": str(folder), "CARD_DOUBLE": "1"}


def _undefined(folder: Path) -> set[str]:
    """Names of CUDA functions that torch's libraries want from elsewhere."""
    names = set()
    for library in LIBRARIES:
        command = ["nm", "-D", "--undefined-only", folder / library]
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
        found = (line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines())
        names |= {name for name in found if NAMES.match(name)}
    return names


if __name__ == "__main__":
    for name, value in build(Path(sys.argv[1]).absolute()).items():
        print(f"{name}={value}")
