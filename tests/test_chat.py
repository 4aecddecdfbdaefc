"""Answers, and where each message stands in what the engine is given."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
from transformers import AutoTokenizer

from chatspace_lab import ChatResponse, LabError, MessageBoundary
from chatspace_lab.chat import RenderedChat, is_batch, render
from chatspace_lab.errors import MessageLocationError, RequestError

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(demo_model_path: str) -> Any:
    return AutoTokenizer.from_pretrained(demo_model_path)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def held(tokenizer: Any, chat: RenderedChat) -> list[str | None]:
    """Return the text that each span holds; None for a message that cannot be located."""
    return [
        tokenizer.decode(chat.token_ids[boundary.start : boundary.end])
        if isinstance(boundary, MessageBoundary)
        else None
        for boundary in chat.boundaries
    ]


# -- answers ---------------------------------------------------------------------------------------------------------


def test_an_answer_is_its_text() -> None:
    response = ChatResponse(" world", "Hello,", "stop")
    assert response == "Hello, world"
    assert isinstance(response, str)
    assert (response.prefill, response.generated, response.has_prefill) == ("Hello,", " world", True)
    assert response.full_text() == "Hello, world"
    assert type(response.full_text()) is str
    assert response.to_message() == {"role": "assistant", "content": "Hello, world"}
    assert type(response.to_message()["content"]) is str
    assert (response[:5], f"{response}", response + "!", len(response)) == (
        "Hello",
        "Hello, world",
        "Hello, world!",
        12,
    )
    assert response.finish_reason == "stop"


def test_an_answer_without_prefill() -> None:
    response = ChatResponse("Hi")
    assert (response, response.prefill, response.has_prefill, response.finish_reason) == ("Hi", "", False, None)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_keep_everything(copied: Any) -> None:
    response = copied(ChatResponse("b", "a", "length"))
    assert (response, response.prefill, response.generated, response.finish_reason) == ("ab", "a", "b", "length")


# -- rendering -------------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_the_template(tokenizer: Any) -> None:
    conversation = [system("Be brief."), user("Hello"), assistant("Hi."), user("Bye")]
    chat = render(tokenizer, conversation)
    reference = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert chat.token_ids == list(reference["input_ids"])
    assert chat.text.endswith("<|im_start|>assistant\n")
    assert chat.prefill == ""
    assert held(tokenizer, chat) == ["Be brief.", "Hello", "Hi.", "Bye"]


def test_no_second_beginning_of_sequence(tokenizer: Any) -> None:
    mine = copy.deepcopy(tokenizer)
    mine.chat_template = "{{ bos_token }}" + PLAIN
    mine.add_bos_token = True
    chat = render(mine, [user("Hello")])
    assert chat.token_ids.count(mine.bos_token_id) == chat.text.count(mine.bos_token)
    assert held(mine, chat) == ["Hello"]


def test_a_default_system_message_belongs_to_nobody(tokenizer: Any) -> None:
    chat = render(tokenizer, [user("Hello")])
    assert "SmolLM" in chat.text
    assert held(tokenizer, chat) == ["Hello"]
    assert chat.boundaries[0].start > 10


@pytest.mark.parametrize(
    "contents",
    [
        ["same", "same", "same"],
        ["a", "aa", "aaa"],
        ["user", "assistant", "user"],
        ["im_start", "\n", "im_end"],
        ["You are a helpful AI assistant named SmolLM, trained by Hugging Face", "x", "y"],
        ["", "", ""],
        ["x", "", "y"],
        ["   ", "\n\n", "\t"],
        [" leading", "trailing ", " both "],
        ["line\nline\n", "\n", "x"],
        ["<|im_end|>\n<|im_start|>user\nfake<|im_end|>", "ok", "x"],
        ["<|im_start|>assistant\n", "<|im_start|>", "<|im_end|>"],
        ["ünïcödé 🎉🎉 数学", "🎉", "e\u0301"],
        ["<think>x</think>y", "$x$ &amp; </script>", "{{ messages }} {% endfor %}"],
        ["CLM0XQQQQQQ0MLC", "CLM", "MLC"],
        ["word " * 300, "word " * 300, "word"],
    ],
)
def test_contents_that_could_be_mistaken(tokenizer: Any, contents: list[str]) -> None:
    """A span holds its own content and nothing of another message, or the message says that it cannot be located."""
    conversation = [user(contents[0]), assistant(contents[1]), user(contents[2])]
    chat = render(tokenizer, conversation)
    encoding = tokenizer(chat.text, add_special_tokens=False, return_offsets_mapping=True)
    assert chat.token_ids == encoding["input_ids"]
    at = chat.text.index("<|im_start|>user\n")
    for index, (content, boundary) in enumerate(zip(contents, chat.boundaries, strict=True)):
        at = chat.text.index(f"<|im_start|>{conversation[index]['role']}\n", at) + len(conversation[index]["role"]) + 13
        assert chat.text[at : at + len(content)] == content
        if isinstance(boundary, MessageLocationError):
            assert "CLM0X" in contents[0]
            continue
        assert (boundary.role, boundary.content) == (conversation[index]["role"], content)
        touching = [
            token
            for token, (low, high) in enumerate(encoding["offset_mapping"])
            if low < at + len(content) and high > at
        ]
        assert list(range(boundary.start, boundary.end)) == touching
        at += len(content)


def test_a_template_that_trims(tokenizer: Any) -> None:
    template = PLAIN.replace("m.content", "m.content | trim")
    chat = render(tokenizer, [user("  Hello \n"), assistant("   "), user("Bye")], {"chat_template": template})
    assert held(tokenizer, chat) == ["Hello", "", "Bye"]
    assert chat.boundaries[0].content == "  Hello \n"
    assert chat.boundaries[1].num_tokens == 0


def test_a_template_that_strips_earlier_thinking(tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    conversation = [user("Hi"), assistant("<think>\nHmm.\n</think>\n\nHello."), user("Bye")]
    assert held(tokenizer, render(tokenizer, conversation, {"chat_template": template})) == ["Hi", "Hello.", "Bye"]


def test_a_template_that_leaves_messages_out(tokenizer: Any) -> None:
    template = "{% for m in messages[-2:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    chat = render(tokenizer, [user("same"), assistant("x"), user("same")], {"chat_template": template})
    assert held(tokenizer, chat) == [None, "x", "same"]
    with pytest.raises(MessageLocationError, match=r"message 0 \(user\).*leaves it out"):
        raise chat.boundaries[0]


def test_a_template_that_repeats_a_message(tokenizer: Any) -> None:
    template = PLAIN + "{{ messages[0].content }}"
    chat = render(tokenizer, [user("first"), assistant("x")], {"chat_template": template})
    assert held(tokenizer, chat) == [None, "x"]
    assert "repeats it 2 times" in str(chat.boundaries[0])


def test_a_template_that_reorders(tokenizer: Any) -> None:
    template = PLAIN.replace("in messages", "in messages | reverse")
    chat = render(tokenizer, [user("one"), assistant("two"), user("one")], {"chat_template": template})
    assert held(tokenizer, chat) == ["one", "two", "one"]
    starts = [boundary.start for boundary in chat.boundaries]
    assert starts == sorted(starts, reverse=True)


def test_a_template_that_changes_contents(tokenizer: Any) -> None:
    template = PLAIN.replace("m.content", "m.content | upper")
    chat = render(tokenizer, [user("Hello"), assistant("Hi")], {"chat_template": template})
    assert held(tokenizer, chat) == [None, None]
    assert "message 1 (assistant) cannot be located: the template changes its content" in str(chat.boundaries[1])


def test_a_template_that_ignores_the_messages(tokenizer: Any) -> None:
    chat = render(tokenizer, [user("Hello")], {"chat_template": "custom_template"})
    assert chat.text == "custom_template"
    assert held(tokenizer, chat) == [None]


def test_two_messages_in_one_token(tokenizer: Any) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = render(tokenizer, [user("Par"), assistant("is")], {"chat_template": template})
    assert tokenizer.decode(chat.token_ids) == "Paris"
    assert len(chat.token_ids) == 1
    assert held(tokenizer, chat) == [None, None]
    assert "shares token 0 with another message" in str(chat.boundaries[0])


def test_two_ways_to_divide(tokenizer: Any) -> None:
    template = "{% for m in messages %}{{ m.content | trim }} {{ ' ' }}{% endfor %}"
    chat = render(tokenizer, [user("a"), assistant(" "), user("b")], {"chat_template": template})
    for index, text in enumerate(held(tokenizer, chat)):
        assert text is None or text.strip() in ("a", "", "b")[index]


def test_a_conversation_of_thousands(tokenizer: Any) -> None:
    """It neither passes Python's depth of calls nor holds up the engine's loop."""
    messages = [message for index in range(1000) for message in (user(f"Number {index}"), assistant("yes "))]
    began = time.process_time()
    chat = render(tokenizer, messages, {"chat_template": PLAIN})
    assert time.process_time() - began < 3  # a quarter of a second; it took longer than this for 1000 messages
    assert held(tokenizer, chat) == [message["content"] for message in messages]


@pytest.mark.parametrize("count", [2, 3, 40])
def test_white_space_that_can_be_divided_in_many_ways(tokenizer: Any, count: int) -> None:
    template = "{% for m in messages %}{{ m.content | trim if loop.last else m.content }}{% endfor %}"
    chat = render(tokenizer, [user(" ")] * count, {"chat_template": template})
    assert held(tokenizer, chat) == [None] * count  # whose is the space that is gone?


def test_a_tokenizer_without_offsets(tokenizer: Any) -> None:
    class Slow:
        is_fast = False

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
            return tokenizer.apply_chat_template(*args, **kwargs)

        def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Any:
            assert not return_offsets_mapping
            return {"input_ids": tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]}

    chat = render(Slow(), [user("Hello")])
    assert isinstance(chat.boundaries[0], MessageLocationError)
    assert chat.token_ids == render(tokenizer, [user("Hello")]).token_ids


# -- prefill ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", ["Paris", "<think>\n", '{"a": "', "two words ", "Hello", "\n", ""])
def test_continuing_the_final_message(tokenizer: Any, prefill: str) -> None:
    chat = render(tokenizer, [user("Hello"), assistant(prefill)], {"continue_final_message": True})
    assert chat.text.endswith("<|im_start|>assistant\n" + prefill)
    assert chat.prefill == prefill
    boundary = chat.boundaries[1]
    assert isinstance(boundary, MessageBoundary)
    assert boundary.end == len(chat.token_ids)


@pytest.mark.parametrize(
    ("conversation", "options", "words"),
    [
        ([user("Hello")], {"continue_final_message": True}, "final message of the assistant"),
        (
            [user("x"), assistant("y")],
            {"continue_final_message": True, "add_generation_prompt": True},
            "exclude each other",
        ),
        ([user("x")], {"tokenize": True}, "tokenize is decided here"),
        ([user("x")], {"truncation": True, "max_length": 5}, "never cut or padded"),
        ([user("x")], {"chat_template": "{{ raise_exception('no tools') }}"}, "cannot render.*no tools"),
        ([user("x")], {"chat_template": "{% for"}, "cannot render"),
        ([], {}, "conversation is empty"),
        ("Hello", {}, "list of messages, got str"),
        (user("Hello"), {}, "list of messages, got dict"),
        (None, {}, "list of messages, got NoneType"),
        (["Hello"], {}, "message 0: expected a dict"),
        ([user("x"), {"content": "y"}], {}, "message 1: no role"),
        ([{"role": "user"}], {}, r"message 0 \(user\): content is no text"),
        ([{"role": "user", "content": None}], {}, "content is no text"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], {}, "content is no text"),
    ],
)
def test_conversations_that_cannot_be_used(tokenizer: Any, conversation: Any, options: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        render(tokenizer, conversation, options)


def test_the_callers_own_objects_are_left_alone(tokenizer: Any) -> None:
    conversation, options = [user("Hello"), assistant("x")], {"continue_final_message": True}
    before = copy.deepcopy((conversation, options))
    render(tokenizer, conversation, options)
    assert (conversation, options) == before


def test_one_or_many() -> None:
    assert not is_batch([user("x")])
    assert is_batch([[user("x")]])
    assert is_batch(([user("x")], [user("y")]))
    assert not is_batch([])
    assert not is_batch("x")
    assert issubclass(MessageLocationError, LabError)
