"""``lora.rank: auto``: the more of the context is left out, the more the adapter has to make up for it.

Rank 8 where up to half of the tokens are dropped, 16 above 80 %, multiples of 4 between. Alpha follows, so that
alpha / rank stays what the options say for the usual rank.
"""

from __future__ import annotations

from narrowboat.events import Notice, Tell
from narrowboat.options.schema import USUAL_RANK, LoraOptions

LOW, HIGH = (0.5, 8), (0.8, 16)
"""Share of tokens dropped, and the rank from there on."""


def rank_for(dropped: float) -> int:
    """The rank for a share of dropped tokens between 0 and 1."""
    share = (dropped - LOW[0]) / (HIGH[0] - LOW[0])
    return 4 * round((LOW[1] + min(max(share, 0.0), 1.0) * (HIGH[1] - LOW[1])) / 4)


def choose_rank(options: LoraOptions, dropped: float, why: str, tell: Tell) -> LoraOptions:
    """``options`` with a number for its rank.

    Args:
        options: may say auto.
        dropped: share of the data's tokens that the model does not see.
        why: what drops them.
        tell: hears what was chosen and why.
    """
    if options.rank != "auto":
        return options
    rank = rank_for(dropped)
    alpha = options.alpha * rank / USUAL_RANK
    tell(Notice(f"lora.rank auto: {why} leaves out {dropped:.0%} of the tokens; rank {rank}, alpha {alpha:g}"))
    return options.model_copy(update={"rank": rank, "alpha": alpha})
