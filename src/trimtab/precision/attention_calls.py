"""What is placed around the attention of single modules, without touching a kernel: watchers of keys, other backwards.

transformers' attention modules look their attention function up in a table by a name that the config holds, and call it
with themselves as the first argument. While anything is placed, the table hands out that function behind a look at the
module: one that carries nothing of ours computes as ever, of whatever model it is. The name, the config and the masks
that are made by the name stay as they are, and with the last placement the table is as it was.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from trimtab.precision.units import named_modules

__all__ = ["Attention", "Wrapper", "attention_modules", "place_around"]

Attention = Callable[..., tuple[Tensor, Any]]
"""``attention(module, query, key, value, mask, **settings)``, all (batch, heads, tokens, d_head); gives the output,
(batch, tokens, heads, d_head), and the weights or None.
"""

Wrapper = Callable[..., tuple[Tensor, Any]]
"""``wrapper(attention, module, query, key, value, mask, **settings)``; returns as the attention does."""

_TABLE = "ALL_ATTENTION_FUNCTIONS"
_KEY = "_trimtab_attention"


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Those modules of ``model`` that look their attention up in a table, by name, from the input to the loss."""
    modules = {"": model} | named_modules(model)
    return {name: module for name, module in modules.items() if _table_of(type(module)) is not None}


def place_around(module: nn.Module, wrapper: Wrapper, *, innermost: bool = False) -> Callable[[], None]:
    """Have ``wrapper`` called in place of the attention of ``module``, which it is handed, until it is taken away.

    A copy of the module is a plain one.

    Args:
        module: One of ``attention_modules``.
        wrapper: What is called; the latest placed first, but those placed ``innermost`` after all others.
        innermost: Whether it may compute in another way, which those who only look should see the effect of.

    Returns: Takes it away; safe to call twice.
    """
    table = _table_of(type(module))
    assert table is not None, f"{type(module).__name__} looks its attention up in no table"
    around = module.__dict__.get(_KEY)
    if around is None:
        around = module.__dict__[_KEY] = _Around()
    placed = (wrapper,)
    around.wrappers = (placed, *around.wrappers) if innermost else (*around.wrappers, placed)
    _stand_before(table)
    # A module may be let go of without anything being taken away.
    gone = weakref.finalize(module, _step_back, table)
    gone.atexit = False

    def take_away() -> None:
        if not any(p is placed for p in around.wrappers):
            return
        around.wrappers = tuple(p for p in around.wrappers if p is not placed)
        if not around.wrappers:
            module.__dict__.pop(_KEY, None)
        gone()

    return take_away


class _Around:
    """What is placed around the attention of one module, the innermost first."""

    def __init__(self) -> None:
        self.wrappers: tuple[tuple[Wrapper], ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model is a plain model."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __call__(self, attention: Attention, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        for (wrapper,) in self.wrappers:
            attention = functools.partial(wrapper, attention)
        return attention(module, *args, **kwargs)


def _stand_before(table: Any) -> None:
    """Have ``table`` hand out functions that look at the module first; counted, so that each placement can end it."""
    ours = table.__dict__.get("get_interface")
    if isinstance(ours, _Lookup):
        ours.num_placed += 1
    else:
        table.__dict__["get_interface"] = _Lookup(table.get_interface)


def _step_back(table: Any) -> None:
    ours = table.__dict__.get("get_interface")
    # Somebody may have put theirs before ours since; without a placement ours changes nothing.
    if isinstance(ours, _Lookup):
        ours.num_placed -= 1
        if ours.num_placed == 0:
            del table.__dict__["get_interface"]


class _Lookup:
    """The table's own look-up, whose result looks at the module before it computes."""

    def __init__(self, look_up: Callable[..., Attention]) -> None:
        self.look_up = look_up
        self.num_placed = 1

    def __call__(self, *args: Any, **kwargs: Any) -> Attention:
        attention = self.look_up(*args, **kwargs)

        def look_first(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            around = module.__dict__.get(_KEY)
            if around is None:
                return attention(module, *args, **kwargs)
            return around(attention, module, *args, **kwargs)

        return look_first


def _table_of(kind: type[nn.Module]) -> Any:
    """The table in which modules of a class look their attention up, or None."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else None
            if isinstance(function, types.FunctionType) and {_TABLE, "get_interface"} <= {*function.__code__.co_names}:
                table = function.__globals__.get(_TABLE)
                if hasattr(table, "get_interface"):
                    return table
    return None
