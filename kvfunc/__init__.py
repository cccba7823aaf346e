"""Edit the KV cache of a language model: append, drop, repos. Pure functions on pytrees.

    cache, new = kvfunc.reserve(cache, n)        # slots and births for n tokens
    cache, info = kvfunc.drop(cache, mask)       # later queries cannot attend to these slots
    cache, info = kvfunc.repos(cache)            # survivors are renumbered from 0; no KV byte moves

Names are imported on first use, so that parts without JAX need none.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfunc.anchors import AnchorPool as AnchorPool
    from kvfunc.attention import Partial as Partial
    from kvfunc.attention import segment_attention as segment_attention
    from kvfunc.cache import KVCache as KVCache
    from kvfunc.cache import append as append
    from kvfunc.cache import compact as compact
    from kvfunc.cache import drop as drop
    from kvfunc.cache import init as init
    from kvfunc.cache import keep as keep
    from kvfunc.cache import repos as repos
    from kvfunc.cache import reserve as reserve
    from kvfunc.cache import rows_for as rows_for
    from kvfunc.cache import write as write
    from kvfunc.checkpoint import Checkpoints as Checkpoints
    from kvfunc.history import Drop as Drop
    from kvfunc.history import History as History
    from kvfunc.history import Repos as Repos
    from kvfunc.policies import rolling_tool_outputs as rolling_tool_outputs
    from kvfunc.quantize import Quantized as Quantized
    from kvfunc.rope import Rope as Rope
    from kvfunc.rope import Rotation as Rotation
    from kvfunc.rows import Rows as Rows
    from kvfunc.segments import Segment as Segment
    from kvfunc.segments import splice as splice
    from kvfunc.storage import KV as KV
    from kvfunc.storage import fastest_dtype as fastest_dtype

_HOMES = {
    "anchors": ("AnchorPool",),
    "attention": ("Partial", "segment_attention"),
    "cache": ("KVCache", "append", "compact", "drop", "init", "keep", "repos", "reserve",
              "rows_for", "write"),
    "checkpoint": ("Checkpoints",),
    "history": ("Drop", "History", "Repos"),
    "policies": ("rolling_tool_outputs",),
    "quantize": ("Quantized",),
    "rope": ("Rope", "Rotation"),
    "rows": ("Rows",),
    "segments": ("Segment", "splice"),
    "storage": ("KV", "fastest_dtype"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvfunc' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kvfunc.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
