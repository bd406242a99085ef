"""Drafters of the `speculators` package, switched over to aotcache by one call.

```python
from aotcache.integrations.speculators import switch

model = switch(DFlashDraftModel(config))  # then attach it, as any drafter
```

Everything is set on the one model: its masks and its attention are `aotcache.flex`'s, and
where the package compiles a drafter's forward (it does on CUDA hosts), the model runs the
original. Its class, its configuration, other models and the package stay as they are.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from aotcache.errors import CallRefused, ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn.attention.flex_attention import BlockMask

M = TypeVar("M", bound="nn.Module")

ATTENTION = "aotcache_speculators"
"""The name of `attention` in the package's table of attention functions."""

_FLEX = "simple_flex_attention"
"""What a drafter calls its flex attention; some of its code asks for this name."""

_GROWS = "extend_mask_for_draft_tokens"
"""The function by which EAGLE-3 grows its masks. It counts in whole blocks of `_BLOCK`."""

_BLOCK = 128


def switch(model: M) -> M:
    """Make a drafter run from artifacts: its attention, its masks and an uncompiled forward.

    Call it in the spec's factory, before `attach`. Deep copies and pickles stay switched. What the
    drafter was built with ("simple_flex_attention", "sdpa", "eager") does not matter.

    The loss stays the package's own. Its default is a kernel of Triton's, which does not run on CPUs:
    there, pass `loss_config=resolve_loss_config("kl_div", "eager")`.

    Args:
        model: A DFlash, EAGLE-3 or P-EAGLE drafter, or one derived from these; not wrapped.

    Returns:
        The model itself.

    Raises:
        ConfigError: `speculators` is not installed, or the model is none of these.
    """
    families = _families()
    if not isinstance(model, families):
        raise ConfigError(
            f"cannot switch a {type(model).__module__}.{type(model).__qualname__}; expected one of "
            f"{', '.join(family.__name__ for family in families)} or a class derived from these. Of a wrapped or "
            "compiled model, switch the drafter inside, before it is wrapped",
            found=type(model).__qualname__,
            expected=[family.__name__ for family in families],
        )
    _register()
    drafter: Any = model
    drafter._create_mask_fn = MaskBuilder(whole_blocks=_grows_by_blocks(type(drafter)))
    drafter._attn_impl = _FLEX
    for module in drafter.layers.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            # A copy: drafters may share their configuration, and checkpoints hold it.
            module.config = copy.copy(module.config)
            module.config._attn_implementation = ATTENTION
    if _uncompiled(type(drafter).forward) is not type(drafter).forward:
        drafter.forward = Uncompiled(drafter)
    return model


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What the package's own flex attention computes; like it, without dropout.

    Args:
        module: The attention layer; not looked at.
        query: `[B, Hq, Q, E]`.
        key, value: `[B, Hkv, KV, E]`, Hq a multiple of Hkv.
        attention_mask: Who sees whom; None: everybody.
        scaling: Factor of the scores; default `1 / sqrt(E)`.

    Returns:
        `[B, Q, Hq, E]`, contiguous, and no weights.
    """
    from aotcache.flex import flex_attention

    out = flex_attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


class MaskBuilder:
    """`aotcache.flex.create_block_mask`, as a drafter calls it.

    Args:
        whole_blocks: The drafter grows its masks by whole blocks, so it needs lengths of
            whole blocks, or of less than one.
    """

    def __init__(self, *, whole_blocks: bool) -> None:
        self.whole_blocks = whole_blocks

    def __call__(self, mask_mod: Callable[..., Tensor], **sizes: Any) -> BlockMask:
        """See `aotcache.flex.create_block_mask`.

        Raises:
            CallRefused: a length for which the grown mask would miss some keys.
        """
        from aotcache.flex import create_block_mask

        length = sizes["Q_LEN"]
        if self.whole_blocks and length > _BLOCK and length % _BLOCK:
            raise CallRefused(
                f"this drafter grows its masks by whole blocks of {_BLOCK} tokens ({_GROWS}): with {length} tokens "
                f"later steps would miss some. Pad the batch to a multiple of {_BLOCK}, or to less than that: with "
                "[buckets] such as 512, 1024, 2048, or up to 128, the shorter batches of warming fit, too",
                expected=_BLOCK,
                found=length,
            )
        return create_block_mask(mask_mod, **sizes)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Another process may unpickle a drafter before it switches one.
        _register()
        self.__dict__.update(state)


class Uncompiled:
    """Stands in a drafter's place of `forward`: what its class's forward was before it was compiled.

    No bound method, of which a pickle keeps the name alone, and with it the class's.
    """

    def __init__(self, drafter: nn.Module) -> None:
        self.drafter = drafter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The drafter's forward."""
        return _uncompiled(type(self.drafter).forward)(self.drafter, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(_uncompiled(type(self.drafter).forward))
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _families() -> tuple[type[nn.Module], ...]:
    try:
        from speculators.models.dflash import DFlashDraftModel
        from speculators.models.eagle3 import Eagle3DraftModel
        from speculators.models.peagle import PEagleDraftModel
    except ImportError as error:
        raise ConfigError(
            f"aotcache.integrations.speculators needs speculators ({error}); run: pip install speculators"
        ) from error
    return DFlashDraftModel, Eagle3DraftModel, PEagleDraftModel


def _register() -> None:
    from speculators.models.attention import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)


def _uncompiled(forward: Any) -> Any:
    """The function inside `torch.compile`, or `forward` itself."""
    while hasattr(forward, "_torchdynamo_orig_callable"):  # private torch name, tried on 2.13.0
        forward = forward._torchdynamo_orig_callable
    return forward


def _grows_by_blocks(kind: type) -> bool:
    """Whether a drafter's forward, or one that it calls through `super`, grows its masks."""
    for base in kind.__mro__:
        if "forward" in vars(base):
            names = _uncompiled(vars(base)["forward"]).__code__.co_names
            if _GROWS in names or "super" not in names:
                return _GROWS in names
    return False
