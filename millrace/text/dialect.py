"""How one model is spoken to and understood: its template, its output format, its markers.

Everything that depends on the model's family and not on the request, worked out once. Adapters give
it a conversation and get a prompt; they give it a prompt and get a parser for the answer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from millrace.errors import BadRequest, Unsupported
from millrace.protocol import Thinking
from millrace.text import grammar as grammars
from millrace.text.conversation import Conversation, ConversationTurn
from millrace.text.formats import (
    OutputFormat,
    OutputParser,
    ThinkingControls,
    choose,
    inside_thought,
    thinking_controls,
)
from millrace.text.formats.style import Style, probe
from millrace.text.grammar.lark import Entry
from millrace.text.grammar.trial import GrammarTrial
from millrace.text.messages import prepare
from millrace.text.open_end import cut, open_ended
from millrace.text.picture_turns import PictureStyle, probe_pictures
from millrace.text.pictures import PictureWords, guarded
from millrace.text.template import ChatTemplate
from millrace.text.template_renderer import LocalRenderer, TemplateRenderer
from millrace.text.tokenizer import Tokenizer
from millrace.text.volatile import Volatile

_PROBED_TURNS = 200


class Dialect:
    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
        volatile: Volatile | None = None,
        pictures: PictureWords | None = None,
        renderer: TemplateRenderer | None = None,
    ) -> None:
        """`pictures` is how prompts speak of them, for a model that takes any. `renderer` runs the
        template; without one, it runs in this process."""
        self._tokenizer = tokenizer
        self.renderer = renderer or LocalRenderer()
        self.pictures = pictures
        self._picture_styles: dict[ChatTemplate, PictureStyle] = {}
        self._volatile = volatile or Volatile()
        self._tool_format = tool_format
        self._reasoning_format = reasoning_format
        self.trial = GrammarTrial(tokenizer.folder)
        """Where grammars are tried before a request with one is taken."""

    @functools.cached_property
    def template(self) -> ChatTemplate:
        source = self._tokenizer.template_source
        if source is None:
            raise BadRequest(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        return self._compiled(source)

    def _compiled(self, source: str) -> ChatTemplate:
        return ChatTemplate(
            source,
            self.renderer,
            bos_token=self._tokenizer.token_text("bos_token"),
            eos_token=self._tokenizer.token_text("eos_token"),
        )

    @functools.cached_property
    def format(self) -> OutputFormat:
        vocabulary = self._tokenizer.vocabulary
        special = {vocabulary.added[i] for i in vocabulary.special}
        source = self._tokenizer.template_source or ""
        return choose(source, special, self._tool_format, self._reasoning_format)

    @functools.cached_property
    def style(self) -> Style:
        return probe(self.template)

    @functools.cached_property
    def _plain(self) -> tuple[ChatTemplate, Style] | None:
        """The template for conversations without tools, where that is another one."""
        source = self._tokenizer.plain_source
        if source is None:
            return None
        template = self._compiled(source)
        return template, probe(template)

    def _template_for(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> tuple[ChatTemplate, Style]:
        used = tools or any(m.get("role") == "tool" or m.get("tool_calls") for m in messages)
        return (None if used else self._plain) or (self.template, self.style)

    @functools.cached_property
    def keeps_turns(self) -> bool:
        """Whether prompts have the turns of users however many there are: some templates write the newest
        alone. Renders a probe."""
        words = [f"turn{number:03}" for number in range(_PROBED_TURNS)]
        turns = [
            ConversationTurn(role, text)
            for word in words
            for role, text in (("user", word), ("assistant", "yes"))
        ]
        text = self.render(Conversation([*turns, ConversationTurn("user", "last")]))
        return all(word in text for word in words)

    @functools.cached_property
    def controls(self) -> ThinkingControls:
        return thinking_controls(self._tokenizer.template_source or "")

    @property
    def thinks(self) -> bool:
        """Whether the model's answers may hold thoughts."""
        return self.format.thought is not None or self.format.messages is not None

    @functools.cached_property
    def marker_tokens(self) -> dict[str, int]:
        """The markers that grammars must match as tokens, since no text spells them."""
        known = self.trial.tokenizer
        added = self._tokenizer.vocabulary.added
        return {text: id for id, text in added.items() if known.is_special_token(id)}

    def _picture_style(self, template: ChatTemplate) -> PictureStyle | None:
        if self.pictures is None:
            return None
        if template not in self._picture_styles:
            self._picture_styles[template] = probe_pictures(template, self.pictures)
        return self._picture_styles[template]

    def render(self, chat: Conversation) -> str:
        """The prompt's text."""
        return self.render_pictures(chat)[0]

    def render_pictures(self, chat: Conversation) -> tuple[str, list[str]]:
        """The prompt's text with a placeholder for each picture, and their digests in that order."""
        tools = chat.tools if chat.tool_choice != "none" else []
        messages, _ = self._volatile.strip(self._without_thinking(chat))
        given = chat.template_arguments
        if self.pictures is not None:
            messages, tools = guarded(messages, self.pictures), guarded(tools, self.pictures)
            given = guarded(given, self.pictures)
        template, style = self._template_for(messages, tools)
        ready = prepare(messages, tools, style, self.format, self._picture_style(template))
        arguments = (
            ready.arguments
            | self.controls.arguments(chat.thinking, chat.effort, chat.thinking_budget)
            | given
        )
        text = template.render(
            open_ended(ready.messages) if chat.continue_final else ready.messages,
            tools=ready.tools,
            add_generation_prompt=chat.add_generation_prompt and not chat.continue_final,
            **arguments,
        )
        text = cut(text) if chat.continue_final else text
        return text, ready.digests

    def stripped(self, chat: Conversation) -> int:
        """How many lines of the conversation are left out of its prompt."""
        return self._volatile.strip(chat.rendered())[1]

    def _without_thinking(self, chat: Conversation) -> Sequence[Mapping[str, Any]]:
        """Some templates know no switch but a word in the system message."""
        word = self.controls.off_word
        if chat.thinking is not False or word is None or self.controls.switch is not None:
            return chat.rendered()
        first, *rest = chat.rendered()
        if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
            return [{**first, "content": f"{first['content']}\n{word}"}, *rest]
        return [{"role": "system", "content": word}, first, *rest]

    def ignored(self, chat: Conversation) -> list[str]:
        """The fields of the conversation that this model cannot be steered by, by their names.

        An adapter names them to its client as the client's protocol does.
        """
        found: list[str] = []
        controls = self.controls
        steered = any((controls.switch, controls.effort, controls.budget, controls.off_word))
        deaf = chat.thinking is not None and not steered and chat.thinking != self.thinks
        # "none" is a wish not to think, which a switch or a model without thoughts fulfils.
        honoured = controls.effort is not None or (chat.effort == "none" and not deaf)
        if chat.effort is not None and not honoured:
            found.append("effort")
        if deaf and chat.effort != "none":
            found.append("thinking")
        return found

    def unknown_arguments(self, names: Iterable[str]) -> list[str]:
        """Those of the template arguments that the template does not read."""
        source = self._tokenizer.template_source
        return [] if source is None else [n for n in names if n not in self.template.variables]

    def parser(self, chat: Conversation, prompt: str) -> OutputParser:
        specs = chat.specs
        return OutputParser(self.format, specs or None, prompt=prompt, parallel=chat.parallel)

    def grammar(self, chat: Conversation, entry: Entry | None, prompt: str) -> str | None:
        """What the answer must look like, or None if it is free."""
        specs = chat.specs
        thinking = self._thinking(chat, prompt)
        if chat.tool_choice == "required":
            return grammars.calls_grammar(
                self.format,
                specs,
                self.marker_tokens,
                name=chat.tool_name,
                parallel=chat.parallel and chat.tool_name is None,
                thinking=thinking,
                prompt=prompt,
            )
        if entry is None:
            return None
        if specs:
            return grammars.calls_or_answer_grammar(
                entry,
                self.format,
                specs,
                self.marker_tokens,
                parallel=chat.parallel,
                thinking=thinking,
                prompt=prompt,
            )
        return grammars.answer_grammar(entry, self.format, self.marker_tokens, thinking)

    def strict(self, chat: Conversation) -> grammars.Lazy | None:
        """For tool_choice auto: the grammar of a call once it opens, where a tool is strict."""
        if chat.tool_choice != "auto" or not any(t.strict for t in chat.specs):
            return None
        return grammars.strict_grammar(self.format, chat.specs, self.marker_tokens)

    def limit(self, chat: Conversation, prompt: str) -> Thinking | None:
        """The thinking budget in tokens, for the engine."""
        if chat.thinking_budget is None or chat.thinking is False:
            return None
        thought, close = self.format.thought, self.format.thinking_close
        messages = self.format.messages
        if close is None or not self.thinks:
            raise Unsupported(
                "This model does not think, so a thinking budget means nothing to it.",
                param="thinking_token_budget",
            )
        if thought is not None:
            opens, closes = thought.opens[0], thought.closes[0]
        else:
            assert messages is not None
            channel = f"{messages.header[0]}analysis" if messages.header else ""
            opens, closes = channel + messages.message, messages.ends[0]
        encode = self._tokenizer.encode
        return Thinking(
            budget=chat.thinking_budget,
            inside=inside_thought(self.format, prompt),
            opens=encode(opens),
            closes=encode(closes),
            ending=encode(close),
        )

    def _thinking(self, chat: Conversation, prompt: str) -> grammars.Thinking:
        if inside_thought(self.format, prompt):
            return "inside"
        if self.format.messages is not None:
            return "may"
        if self.format.thought is None or chat.thinking is False:
            return "no"
        return "may"
