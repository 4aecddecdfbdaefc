"""Objects of a running engine whose attributes nothing reads again: setting one raises and says what to use."""

from __future__ import annotations

import copy
from typing import Any

from chatspace_lab.errors import ReadOnlyError

TEMPLATE = (
    "pass another template with each call, as chat_options={'chat_template': …}: chat, stream_chat, measure, sweep and "
    "capture take it"
)
ADVICE = {
    "tokenizer": "the engine has its own; pass token ids, or chat_options={'chat_template': …}",
    "chat_template": TEMPLATE,
    "config": "start another engine with it",
}
"""What to do in place of setting an attribute; others are arguments of calls, or of the configuration."""


class Fixed:
    """Refuses to have public attributes set once :meth:`_fix` was called, but those in ``_open`` and with a setter."""

    _is_fixed = False
    _open: frozenset[str] = frozenset()

    def _fix(self) -> None:
        self._is_fixed = True

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute.

        Raises
        ------
        ReadOnlyError
            If setting it would have no effect.
        """
        setter = getattr(getattr(type(self), name, None), "fset", None)
        if self._is_fixed and not name.startswith("_") and name not in self._open and setter is None:
            what = "is fixed while the engine runs" if hasattr(self, name) else "does not exist"
            advice = ADVICE.get(name, "pass it to the call, or start an engine with it (VLLMSteeringConfig)")
            raise ReadOnlyError(f"{type(self).__name__}.{name} {what}, setting it has no effect: {advice}")
        super().__setattr__(name, value)


def fixed_tokenizer(tokenizer: Any) -> Any:
    """Return a view of the engine's tokenizer that cannot be changed; a copy of it is free to be.

    The engine has copies of its tokenizer, for its threads, to which a change would never come.
    """
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer

    def refusal(what: str) -> str:
        advice = (
            TEMPLATE if what == "chat_template" else "change a copy (copy.deepcopy) and pass the token ids it gives"
        )
        return f"tokenizer.{what} cannot be changed: the engine would not read it; {advice}"

    base: Any = type(tokenizer)

    class FixedTokenizer(base):
        def __setattr__(self, name: str, value: object) -> None:
            if not name.startswith("_"):
                raise ReadOnlyError(refusal(name))
            object.__setattr__(self, name, value)

        def add_tokens(self, *args: Any, **kwargs: Any) -> int:
            raise ReadOnlyError(refusal("add_tokens"))

        def add_special_tokens(self, *args: Any, **kwargs: Any) -> int:
            raise ReadOnlyError(refusal("add_special_tokens"))

        def __copy__(self) -> Any:
            return copy.deepcopy(_single(tokenizer))

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return copy.deepcopy(_single(tokenizer), memo)

        def __reduce__(self) -> Any:
            return copy.copy, (_single(tokenizer),)

    FixedTokenizer.__name__ = FixedTokenizer.__qualname__ = base.__name__
    view = object.__new__(FixedTokenizer)
    view.__dict__.update(tokenizer.__dict__)
    return view


def _single(tokenizer: Any) -> Any:
    """Return the tokenizer behind vLLM's pool of copies (``maybe_make_thread_pool``), of which it is a class."""
    made_by, arguments, *_ = tokenizer.__reduce_ex__(4)
    return arguments[0] if made_by.__name__ == "maybe_make_thread_pool" else tokenizer
