"""The conversation of a steering panel: what was said, and what answered it with which values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from chatspace_lab.errors import RequestError
from chatspace_lab.panels.asked import Sampling, Turn, conversation
from chatspace_lab.panels.receipt import made

if TYPE_CHECKING:
    from chatspace_lab.panels.answers import Answer


class Talk:
    """Turns, the last of which is answered by the panel's runs; the others keep the answers that they had.

    Attributes
    ----------
    turns, sampling, system
        As shown. Turns and sampling are replaced, never edited.
    split_special_tokens
        Whether special tokens that a message spells are sent as ordinary text.
    """

    def __init__(self, sampling: Sampling, system: str | None, split_special_tokens: bool = False) -> None:
        self.system, self.sampling, self.split_special_tokens = system, sampling, split_special_tokens
        self.turns: tuple[Turn, ...] = ()

    @property
    def system(self) -> str | None:
        """The system message, or None."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if not isinstance(text, str | None):
            raise RequestError(f"system is a text or None, got {text!r}")
        self._system = text

    @property
    def split_special_tokens(self) -> bool:
        """Whether special tokens that a message spells are sent as ordinary text."""
        return self._split

    @split_special_tokens.setter
    def split_special_tokens(self, split: bool) -> None:
        if not isinstance(split, bool):
            raise RequestError(f"split_special_tokens must be True or False, got {split!r}")
        self._split = split

    def plain(self) -> list[dict[str, Any]]:
        """Return the turns as JSON holds them."""
        return [turn.plain() for turn in self.turns]

    def open(self) -> tuple[Turn, ...]:
        """Return the turns as a run is asked with them: the last is to be answered."""
        return (*self.turns[:-1], self.turns[-1].open())

    def say(self, text: str, answers: Mapping[str, Answer], norms: Mapping[int, float]) -> None:
        """Go on with a message; the last turn keeps the answers, each with a word on the values that it was made with.

        Raises
        ------
        RequestError
            If the message is empty.
        """
        _check(text)
        kept = [*self.turns[:-1]]
        if self.turns:
            mine = {  # an answer to something else, from before a run that failed, is none of this turn
                side: answer
                for side, answer in answers.items()
                if answer.asked.messages(side) == conversation(self.system, self.turns, side)
            }
            notes = {
                side: made(answer.asked, side, norms) + ("" if answer.finish else " · stopped before its end")
                for side, answer in mine.items()
            }
            texts = {side: answer.content for side, answer in mine.items()}
            kept.append(Turn(self.turns[-1].user, texts.get("baseline"), texts.get("steered"), notes))
        self.turns = (*kept, Turn(text))

    def edit(self, index: int, text: str) -> None:
        """Say something else at a turn; what came after it is gone.

        Raises
        ------
        RequestError
            If there is no such turn, or the message is empty.
        """
        if not 0 <= index < len(self.turns):
            raise RequestError(f"there is no turn {index}")
        _check(text)
        self.turns = (*self.turns[:index], Turn(text))


def _check(text: str) -> None:
    if not isinstance(text, str) or not text.strip():
        raise RequestError("the message is empty")
