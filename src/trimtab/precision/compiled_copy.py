"""The stored copy under ``torch.compile``: one graph, whatever width each unit is in.

How wide a copy is, the graph does not know: an operator looks the unit's width up when it runs, and its output is as
long as it turns out (a size that the compiler takes as unknown). A compiler may not give two outputs one storage, so a
layer whose input another layer of the same parent has stored is handed that copy, and stores one of its own only if it
needs another width.

Layout of a copy, one dimension, uint8: float32 scales (none in 16 bits), packed codes (or the plain values in 16 bits),
padding. Its length says which width it has, since lengths are on the host and what is in it is not; see ``_Length``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from trimtab.formats import packed_size
from trimtab.precision.linear_conversion import as_autocast_would, look_up
from trimtab.precision.stored_copy import decode
from trimtab.precision.stored_linear import conv1d

if TYPE_CHECKING:
    from trimtab.precision.saved_activations import LowRow, SavedActivationsConversion

__all__ = ["CopyScope", "allow_dynamic_sizes", "scopes_of", "traced_linear"]

# A copy is longer than this; a shorter one is none, but names the earlier copy that serves instead.
_MOST_EARLIER = 64
_WIDTH_OF_REMAINDER = (2, 4, 8, 16)


_users_of_dynamic_sizes: list[bool] = []
_found: list[bool] = []


def allow_dynamic_sizes() -> Callable[[], None]:
    """Let the compiler take operators whose output sizes it cannot know, until what is returned is called.

    Without this setting of torch's (``capture_dynamic_output_shape_ops``) it breaks the graph at each of them. It is
    read before a trace begins, so it cannot be set for our operators alone.
    """
    import torch._dynamo.config as config  # takes a second where nothing has compiled yet

    if not _users_of_dynamic_sizes:
        _found[:] = [config.capture_dynamic_output_shape_ops]
    _users_of_dynamic_sizes.append(True)
    config.capture_dynamic_output_shape_ops = True

    def give_back() -> None:
        _users_of_dynamic_sizes.pop()
        if not _users_of_dynamic_sizes:
            config.capture_dynamic_output_shape_ops = _found[0]

    return give_back


class CopyScope:
    """What the layers of one module have stored while a compiler traces its forward; empty at all other times.

    Args:
        parent: The module.
    """

    def __init__(self, parent: nn.Module) -> None:
        self.is_open = False
        self.entries: list[tuple[Tensor, torch.dtype, Tensor]] = []
        self._hooks = [
            parent.register_forward_pre_hook(_OpenScope(self)),
            # Not always_call: a compiler tells modules apart by such hooks. What an exception leaves, opening clears.
            parent.register_forward_hook(_CloseScope(self)),
        ]

    def copies_of(self, source: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """The copies that layers of the module have stored of ``source``, cast to ``dtype``."""
        if not self.is_open:
            return []
        found = [copy for stored, cast_to, copy in self.entries if stored is source and cast_to == dtype]
        return found[: _MOST_EARLIER - 1]

    def add(self, source: Tensor, dtype: torch.dtype, copy: Tensor) -> None:
        """Note a copy."""
        if self.is_open:
            self.entries.append((source, dtype, copy))

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()


def scopes_of(model: nn.Module, layers: Iterable[nn.Module]) -> dict[int, CopyScope]:
    """A scope for each module of which two or more ``layers`` are children, by the identities of these layers."""
    wanted = {id(layer) for layer in layers}
    scopes: dict[int, CopyScope] = {}
    for parent in model.modules():
        children = [id(child) for child in parent.children() if id(child) in wanted]
        if len(children) > 1:
            scopes |= dict.fromkeys(children, CopyScope(parent))
    return scopes


def _is_in_a_subgraph() -> bool:
    """Whether the compiler is inside what it traces on its own, as the body of activation checkpointing is.

    It allows no change of our state in there; nor is sharing worth anything where copies are made anew in backward.
    """
    return _ask_the_compiler()


def _ask_the_compiler() -> bool:
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return InstructionTranslator.current_tx().output.current_tracer.parent is not None
    except Exception:  # an inside of torch's, which may move: then nothing is shared
        return True


# What torch._dynamo.assume_constant_result does; that would load the compiler with this module.
_ask_the_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _ScopeHook:
    """Opens or closes a scope; a copy of the model inherits only an inert one."""

    def __init__(self, scope: CopyScope | None) -> None:
        self.scope = scope

    def __deepcopy__(self, memo: dict[int, Any]) -> _ScopeHook:
        return type(self)(None)

    def __reduce__(self) -> tuple[type[_ScopeHook], tuple[None]]:
        return type(self), (None,)


# Two classes for the reason that ``linear_conversion`` has two.
class _OpenScope(_ScopeHook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.scope is not None and torch.compiler.is_compiling() and not _is_in_a_subgraph():
            self.scope.entries.clear()
            self.scope.is_open = True


class _CloseScope(_ScopeHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.scope is not None and torch.compiler.is_compiling() and not _is_in_a_subgraph():
            self.scope.entries.clear()
            self.scope.is_open = False


def traced_linear(module: nn.Module, source: Tensor, scope: CopyScope | None, key: Tensor) -> Tensor:
    """The layer's output, as a compiler traces it.

    Args:
        module: The layer.
        source: Its input.
        scope: That of its parent, where layers may share a copy.
        key: The layer's, as its switch has it.
    """
    x, weight, bias = as_autocast_would(module, source)
    earlier = scope.copies_of(source, x.dtype) if scope is not None else []
    copy = torch.ops.trimtab.store_copy(x.detach(), earlier, key)
    if scope is not None:
        scope.add(source, x.dtype, copy)
    transposed = not isinstance(module, nn.Linear)
    return _LinearFromCopies.apply(x, weight, bias, key, transposed, *earlier, copy)


@torch.library.custom_op("trimtab::store_copy", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def store_copy(x: Tensor, earlier: Sequence[Tensor], key: Tensor) -> Tensor:
    """The copy of ``x`` in the width that the key's unit is in, or the name of one of ``earlier`` that has it."""
    conversion, unit = _look_up(key)
    bits = conversion.bits_in_force(unit)
    micro_batch = conversion.count_call(unit)
    row = _earlier_row(conversion, earlier)
    for k, copy in enumerate(earlier):
        if len(copy) >= _MOST_EARLIER and _width(copy) == bits:
            conversion.observe_copy(x, bits, unit, micro_batch, row)
            return x.new_empty((k + 1,), dtype=torch.uint8)
    if bits == 16:
        row = conversion.observe_copy(x, bits, unit, micro_batch, row)
        parts = [_as_bytes(x)]
    else:
        packed, scale, row = conversion.encode(x, bits, unit, micro_batch, row)
        parts = [_as_bytes(scale), _as_bytes(packed)]
    length = sum(len(part) for part in parts)
    padding = _MOST_EARLIER - length % _MOST_EARLIER + _WIDTH_OF_REMAINDER.index(bits)
    made = torch.cat([*parts, x.new_zeros((padding,), dtype=torch.uint8)])
    if row is None:
        conversion.rows_of_copies.pop(made.data_ptr(), None)  # another copy may have been at this place
    else:
        conversion.rows_of_copies[made.data_ptr()] = row
    return made


def _earlier_row(conversion: SavedActivationsConversion, earlier: Sequence[Tensor]) -> LowRow | None:
    """The statistics of the low width that came with one of these copies of the same tensor.

    Those of a copy that has this width go first: it is the one that a unit on the low-cost path reads.
    """
    copies = [copy for copy in earlier if len(copy) >= _MOST_EARLIER]
    copies.sort(key=lambda copy: _width(copy) != conversion.recipe.low_bits)
    rows = (conversion.rows_of_copies.get(copy.data_ptr()) for copy in copies)
    return next((row for row in rows if row is not None), None)


@store_copy.register_fake
def _(x: Tensor, earlier: Sequence[Tensor], key: Tensor) -> Tensor:
    return x.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.uint8)


@torch.library.custom_op("trimtab::weight_gradient", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def weight_gradient(grad: Tensor, copies: Sequence[Tensor], size: int, key: Tensor, transposed: bool) -> Tensor:
    """The weight gradient from the gradient of the output, shape (tokens, outputs), and the stored copy."""
    *earlier, copy = copies
    if len(copy) < _MOST_EARLIER:
        copy = earlier[len(copy) - 1]
    bits, tokens = _width(copy), len(grad)
    if bits == 16:
        stored = copy[: tokens * size * grad.element_size()].view(grad.dtype).view(tokens, size)
    else:
        scale = copy[: 4 * tokens].view(torch.float32).view(tokens, 1)
        width = packed_size(size, bits)
        packed = copy[4 * tokens : (4 + width) * tokens].view(torch.int8).view(tokens, width)
        stored = decode(packed, scale, bits=bits, size=size, dtype=grad.dtype)
    conversion, unit = _look_up(key)
    corruption = conversion.corruption(unit)
    if corruption is not None:
        channels, factor = corruption
        stored = stored.clone() if bits == 16 else stored
        stored[..., channels] = stored[..., channels] * factor
    return stored.t().mm(grad) if transposed else grad.t().mm(stored)


@weight_gradient.register_fake
def _(grad: Tensor, copies: Sequence[Tensor], size: int, key: Tensor, transposed: bool) -> Tensor:
    outputs = grad.shape[1]
    return grad.new_empty((size, outputs) if transposed else (outputs, size))


class _LinearFromCopies(torch.autograd.Function):
    """A linear layer whose backward reads its input from stored copies."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        key: Tensor,
        transposed: bool,
        *copies: Tensor,
    ) -> Tensor:
        """The plain layer's output."""
        ctx.transposed = transposed
        ctx.size = x.shape[-1]
        ctx.save_for_backward(weight, key, *copies)
        return conv1d(x, weight, bias) if transposed else F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The plain layer's gradients, but for the weight's, which reads the copy."""
        weight, key, *copies = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        flat = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[0]:
            grad_x = flat.mm(weight.t() if ctx.transposed else weight).reshape(*grad.shape[:-1], ctx.size)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.ops.trimtab.weight_gradient(flat, copies, ctx.size, key, ctx.transposed)
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, *(None for _ in copies)


def _look_up(key: Tensor) -> tuple[SavedActivationsConversion, int]:
    conversion, unit, _ = look_up(key)
    return conversion, unit


def _width(copy: Tensor) -> int:
    return _WIDTH_OF_REMAINDER[len(copy) % _MOST_EARLIER]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
