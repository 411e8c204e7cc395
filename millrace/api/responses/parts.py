"""The items of an answer while they are made: each knows its wire events, and becomes its item.

Events here are without their numbers, which the machine that holds the items gives them.
"""

from __future__ import annotations

from typing import Any, Literal

from millrace.api.encrypted_content import seal
from millrace.api.freeform import InputText
from millrace.api.responses.ids import item_id
from millrace.api.responses.items import Item
from millrace.serving.toolbox import Offered
from millrace.text.deltas import ToolCallStart

Wire = dict[str, Any]
Status = Literal["completed", "incomplete"]


class Open:
    """An item under way, at its place in the output."""

    def __init__(self, kind: str, index: int) -> None:
        self._kind = kind
        self._at = {"item_id": item_id(kind), "output_index": index}
        self.text = ""

    @property
    def item(self) -> Item:
        """As it stands."""
        return self._item("in_progress")

    def begin(self) -> list[Wire]:
        index = self._at["output_index"]
        return [_event("response.output_item.added", output_index=index, item=self.item)]

    def add(self, text: str, scores: list[Any]) -> list[Wire]:
        self.text += text
        return [self._event(self._delta, delta=text)]

    def end(self, status: Status) -> tuple[Item, list[Wire]]:
        closing = self._close()
        item = self._item(status)
        index = self._at["output_index"]
        done = _event("response.output_item.done", output_index=index, item=item)
        return item, [*closing, done]

    _delta = ""

    def _item(self, status: str) -> Item:
        return {"id": self._at["item_id"], "type": self._kind, "status": status}

    def _close(self) -> list[Wire]:
        return []

    def _event(self, type: str, **fields: Any) -> Wire:
        return _event(type, **self._at, **fields)


def _event(type: str, **fields: Any) -> Wire:
    return {"type": type, **fields}


def _bare(scores: list[Any]) -> list[Any]:
    """Scores as events tell them: without the bytes that items have."""
    return [
        {
            "token": score["token"],
            "logprob": score["logprob"],
            "top_logprobs": [
                {"token": t.token, "logprob": t.logprob} for t in score["top_logprobs"]
            ],
        }
        for score in scores
    ]


class OpenMessage(Open):
    def __init__(self, index: int) -> None:
        super().__init__("message", index)
        self._scores: list[Any] = []
        self._begun = False

    def begin(self) -> list[Wire]:
        added = super().begin()
        part = self._part()
        self._begun = True
        return [*added, self._event("response.content_part.added", content_index=0, part=part)]

    def add(self, text: str, scores: list[Any]) -> list[Wire]:
        self.text += text
        self._scores += scores
        told = _bare(scores)
        return [
            self._event("response.output_text.delta", content_index=0, delta=text, logprobs=told)
        ]

    def _part(self) -> Item:
        return {
            "type": "output_text",
            "annotations": [],
            "logprobs": list(self._scores),
            "text": self.text,
        }

    def _item(self, status: str) -> Item:
        content = [self._part()] if self._begun else []
        return super()._item(status) | {"role": "assistant", "content": content}

    def _close(self) -> list[Wire]:
        part = self._part()
        done, ended = "response.output_text.done", "response.content_part.done"
        told = _bare(part["logprobs"])
        return [
            self._event(done, content_index=0, text=self.text, logprobs=told),
            self._event(ended, content_index=0, part=part),
        ]


class OpenThought(Open):
    """A thought, told as a summary where the request asked for one, else as it is."""

    def __init__(self, index: int, summary: bool, sealed: bool) -> None:
        super().__init__("reasoning", index)
        self._summary = summary
        self._sealed = sealed
        self._begun = False
        if summary:
            self._where = {"summary_index": 0}
            self._name = "response.reasoning_summary_text"
            self._frame = "response.reasoning_summary_part"
        else:
            self._where = {"content_index": 0}
            self._name = "response.reasoning_text"
            self._frame = "response.content_part"

    def begin(self) -> list[Wire]:
        added = super().begin()
        self._begun = True
        return [*added, self._event(f"{self._frame}.added", **self._where, part=self._part())]

    def add(self, text: str, scores: list[Any]) -> list[Wire]:
        self.text += text
        return [self._event(f"{self._name}.delta", **self._where, delta=text)]

    def _part(self) -> Item:
        return {"type": "summary_text" if self._summary else "reasoning_text", "text": self.text}

    def _item(self, status: str) -> Item:
        parts = [self._part()] if self._begun else []
        item: Item = super()._item(status) | {"summary": parts if self._summary else []}
        if not self._summary:
            item["content"] = parts
        if self._sealed and status != "in_progress":
            item["encrypted_content"] = seal(self.text)
        return item

    def _close(self) -> list[Wire]:
        return [
            self._event(f"{self._name}.done", **self._where, text=self.text),
            self._event(f"{self._frame}.done", **self._where, part=self._part()),
        ]


class OpenCall(Open):
    """A call of a function, under the name the client gave it."""

    _delta = "response.function_call_arguments.delta"
    _body = "arguments"

    def __init__(
        self, index: int, call: ToolCallStart, offered: Offered, kind: str = "function_call"
    ) -> None:
        super().__init__(kind, index)
        self._call = call
        self._offered = offered

    def _item(self, status: str) -> Item:
        item = super()._item(status) | {
            "call_id": self._call.id,
            "name": self._offered.name,
            self._body: self.text,
        }
        if self._offered.namespace is not None:
            item["namespace"] = self._offered.namespace
        return item

    def _close(self) -> list[Wire]:
        done = "response.function_call_arguments.done"
        return [self._event(done, arguments=self.text)]


class OpenFreeform(OpenCall):
    """A call of a freeform tool: what the model writes as JSON comes out as the text in it."""

    _delta = "response.custom_tool_call_input.delta"
    _body = "input"

    def __init__(self, index: int, call: ToolCallStart, offered: Offered) -> None:
        super().__init__(index, call, offered, "custom_tool_call")
        self._reader = InputText()
        self._raw = ""

    def _item(self, status: str) -> Item:
        # The protocol has no status for these.
        return {k: v for k, v in super()._item(status).items() if k != "status"}

    def add(self, text: str, scores: list[Any]) -> list[Wire]:
        self._raw += text
        reported = self._reader.feed(text)
        return super().add(reported, scores) if reported else []

    def _close(self) -> list[Wire]:
        # A model may write something else than it was told to: then all of it is the input.
        odd = [] if self._reader.found else super().add(self._raw, [])
        done = "response.custom_tool_call_input.done"
        return [*odd, self._event(done, input=self.text)]
