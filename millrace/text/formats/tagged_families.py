"""The families that write a call as tags, one per parameter: format and signs of each."""

from __future__ import annotations

import re
from dataclasses import replace

from millrace.text.formats import thoughts
from millrace.text.formats.syntax import (
    FormatFamily,
    JsonCalls,
    Messages,
    OutputFormat,
    TaggedCalls,
)


def _function_calls(section: tuple[str, str], trims: bool) -> TaggedCalls:
    edge = "\n" if trims else ""
    return TaggedCalls(
        opens=("<function=",),
        header_end=(">",),
        header_optional=True,
        param_opens=("<parameter=",),
        param_end=">",
        value_closes=("</parameter>",),
        closes=("</function>",),
        section=section,
        call_open=f"{section[0]}\n<function={{name}}>\n",
        param_write=f"<parameter={{key}}>{edge}{{value}}{edge}</parameter>\n",
        call_close=f"</function>\n{section[1]}",
        between="\n",
        trims=trims,
    )


def _argument_calls(
    suffix: str = "", separator: str = "\n", prefix: str = "", sections: bool = False
) -> TaggedCalls:
    def tag(name: str) -> str:
        slash = "/" * name.startswith("/")
        return f"<{slash}{prefix}{name.removeprefix('/')}{suffix}>"

    header = (tag("tool_sep"), "\n") if sections and not prefix else ("\n",)
    wrap = (tag("tool_calls") + "\n", "\n" + tag("/tool_calls")) if sections else ("", "")
    return TaggedCalls(
        opens=(tag("tool_call"),),
        header_end=header,
        header_optional=True,
        param_opens=(tag("arg_key"),),
        param_end=tag("/arg_key"),
        param_pattern=re.compile(r"\s*(?P<name>[^<>]*?)\s*\Z"),
        type_tags=(tag("arg_type"), tag("/arg_type")),
        value_open=tag("arg_value"),
        value_closes=(tag("/arg_value"),),
        closes=(tag("/tool_call"),),
        section=wrap if sections else None,
        wrap=wrap,
        call_open=tag("tool_call")
        + "{name}"
        + (header[0] + "\n" if len(header) > 1 else separator),
        param_write=tag("arg_key")
        + "{key}"
        + tag("/arg_key")
        + separator
        + tag("arg_value")
        + "{value}"
        + tag("/arg_value")
        + separator,
        call_close=tag("/tool_call"),
        between=separator,
    )


def _invoke_calls(token: str, section: tuple[str, str]) -> TaggedCalls:
    """`<invoke name="…"><parameter name="…">`, each tag with `token` after its bracket."""
    typed = token == "｜DSML｜"
    return TaggedCalls(
        opens=(f"<{token}invoke name=",),
        header_end=(">",),
        param_opens=(f"<{token}parameter name=",),
        param_end=">",
        param_pattern=re.compile(
            r"\s*[\"']?(?P<name>[^\"'<>]*?)[\"']?(?:\s+string=[\"']?(?P<string>true|false)[\"']?)?"
            r"\s*(?P<closed>/)?\s*\Z"
        ),
        value_closes=(f"</{token}parameter>",),
        closes=(f"</{token}invoke>",),
        # A value that holds its own closing tag is told to write it so.
        escaped={f"&lt;/{token}parameter{end}": f"</{token}parameter>" for end in (">", "&gt;")}
        if typed
        else {},
        section=section,
        wrap=section,
        call_open=f'<{token}invoke name="{{name}}">\n',
        param_write=f'<{token}parameter name="{{key}}"'
        + (' string="{string}"' if typed else "")
        + f">{{value}}</{token}parameter>\n",
        call_close=f"</{token}invoke>\n",
    )


QWEN_CALLS = _QWEN = _function_calls(("<tool_call>", "</tool_call>"), trims=True)
_SEED = _function_calls(("<seed:tool_call>", "</seed:tool_call>"), trims=False)
_GLM = _argument_calls()
_GLM_TIGHT = _argument_calls(separator="")
_HUNYUAN = _argument_calls(":opensource", sections=True)
_HUNYUAN_BARE = _argument_calls(sections=True)
_LONGCAT = _argument_calls(prefix="longcat_")
_IFM = _argument_calls(prefix="ifm|", separator="", sections=True)
MINIMAX_CALLS = _MINIMAX2 = _invoke_calls("", ("<minimax:tool_call>\n", "</minimax:tool_call>"))
_DSML_V32 = _invoke_calls("｜DSML｜", ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"))
_DSML_V4 = _invoke_calls("｜DSML｜", ("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"))
_DSML_DROPS = frozenset(
    f"<{slash}｜DSML｜{section}>"
    for slash in ("", "/")
    for section in ("function_calls", "tool_calls")
)
"""The sections of both versions: each is also written by models whose template has the other."""
_DSML_TAILS = {"<｜DSML｜": ">", "</｜DSML｜": ">"}
"""Any other tag with the family's own token: sections whose names are misspelled."""
_ATEM = _invoke_calls("atem:", ("<atem:function_calls>\n", "</atem:function_calls>"))
_LONGCAT_JSON = JsonCalls(opens=("<longcat_tool_call>",), closes=("</longcat_tool_call>",))
_MARK = "]<]minimax[>["
_MINIMAX3 = TaggedCalls(
    opens=(f"{_MARK}<invoke name=",),
    header_end=(">",),
    param_opens=(f"{_MARK}<",),
    param_end=">",
    value_closes=(),
    closes=(f"{_MARK}</invoke>",),
    nested=_MARK,
    section=(f"{_MARK}<tool_call>\n", f"{_MARK}</tool_call>"),
    wrap=(f"{_MARK}<tool_call>\n", f"{_MARK}</tool_call>"),
    call_open=f'{_MARK}<invoke name="{{name}}">',
    param_write=f"{_MARK}<{{key}}>{{value}}{_MARK}</{{key}}>",
    call_close=f"{_MARK}</invoke>\n",
)
_DOTS = _invoke_calls("", ("<dots_function_call>\n", "</dots_function_call>"))
_STEP3 = replace(
    _invoke_calls("steptml:", ("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>")),
    call_open='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n',
    call_close="</steptml:invoke><｜tool_call_end｜>\n",
)
_MINICPM = TaggedCalls(
    opens=("<function name=", "<functionname="),
    header_end=(">",),
    header_optional=True,
    param_opens=("<param name=", "<paramname="),
    param_end=">",
    param_pattern=TaggedCalls.name_pattern,
    value_closes=("</param>",),
    closes=("</function>",),
    escaped={"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'"},
    cdata=True,
    call_open='<function name="{name}">',
    param_write='<param name="{key}">{value}</param>',
    call_close="</function>",
    between="\n",
)
_KIMI3 = TaggedCalls(
    opens=("<|open|>call ",),
    header_end=("<|sep|>",),
    name_pattern=re.compile(r".*?tool=\"(?P<name>[^\"]*)\""),
    param_opens=("<|open|>argument ",),
    param_end="<|sep|>",
    param_pattern=re.compile(r"\s*key=\"(?P<name>[^\"]*)\"(?:\s+type=\"(?P<type>\w+)\")?"),
    value_closes=("<|close|>argument<|sep|>",),
    closes=("<|close|>call<|sep|>",),
    section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    wrap=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    call_open='<|open|>call tool="{name}" index="{index}"<|sep|>',
    param_write='<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
    call_close="<|close|>call<|sep|>",
)


def _drops(calls: TaggedCalls, *more: str) -> frozenset[str]:
    return frozenset({marker.strip() for marker in calls.section or ()} | set(more))


TAGGED: tuple[FormatFamily, ...] = (
    FormatFamily(
        OutputFormat(
            "muse",
            (_ATEM,),
            messages=Messages(
                start="<|start|>",
                message="<|message|>",
                ends=("<|eom|>", "<|eot|>"),
                self_recipient="self",
                inline_bodies=True,
            ),
            drops=_drops(_ATEM),
            primers=("<|start|>assistant",),
        ),
        (("<atem:", "<|message|>"),),
    ),
    FormatFamily(
        OutputFormat(
            "deepseek-v3.2", (_DSML_V32,), thoughts.THINK, drops=_DSML_DROPS, tails=_DSML_TAILS
        ),
        (("｜DSML｜", "function_calls>"),),
    ),
    FormatFamily(
        OutputFormat(
            "deepseek-v4", (_DSML_V4,), thoughts.THINK, drops=_DSML_DROPS, tails=_DSML_TAILS
        ),
        (("｜DSML｜",),),
    ),
    FormatFamily(
        OutputFormat("minimax-m3", (_MINIMAX3,), thoughts.MINIMAX3, drops=_drops(_MINIMAX3, _MARK)),
        (("]<]minimax[>[",),),
    ),
    FormatFamily(
        OutputFormat("minimax-m2", (_MINIMAX2,), thoughts.THINK, drops=_drops(_MINIMAX2)),
        (("<minimax:tool_call>",),),
    ),
    FormatFamily(
        OutputFormat(
            "hunyuan",
            (_HUNYUAN, _HUNYUAN_BARE),
            thoughts.HUNYUAN,
            drops=_drops(_HUNYUAN) | _drops(_HUNYUAN_BARE),
        ),
        (("'<tool_sep{}>'", ":opensource"),),
    ),
    FormatFamily(
        OutputFormat(
            "hunyuan-bare",
            (_HUNYUAN_BARE, _HUNYUAN),
            thoughts.THINK,
            drops=_drops(_HUNYUAN) | _drops(_HUNYUAN_BARE),
        ),
        (("'<tool_sep{}>'",), ("<tool_sep>", "<arg_key>")),
    ),
    FormatFamily(
        OutputFormat(
            "k2-horizon",
            (
                _IFM,
                JsonCalls(opens=("<ifm|tool_call>",), closes=("</ifm|tool_call>",)),
            ),
            thoughts.K2_HORIZON,
            drops=_drops(_IFM),
        ),
        (("<ifm|tool_call",),),
    ),
    FormatFamily(
        OutputFormat("longcat", (_LONGCAT_JSON, _LONGCAT), thoughts.LONGCAT, written=1),
        (("<longcat_tool_call>", "<longcat_arg_key>"),),
    ),
    FormatFamily(
        OutputFormat("longcat-json", (_LONGCAT_JSON, _LONGCAT), thoughts.LONGCAT),
        (("<longcat_tool_call>",),),
        ("<longcat_tool_call>",),
    ),
    FormatFamily(
        OutputFormat(
            "dots",
            (_DOTS, JsonCalls(opens=("<dots_function_call>",))),
            thoughts.THINK,
            drops=_drops(_DOTS),
        ),
        (("<dots_function_call>",),),
    ),
    FormatFamily(
        OutputFormat(
            "step3",
            (_STEP3,),
            thoughts.THINK,
            drops=_drops(_STEP3, "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
            tails={"<｜tool_call_begin｜>": "<｜tool_sep｜>"},
        ),
        (("steptml:",),),
    ),
    FormatFamily(
        OutputFormat(
            "kimi-k3",
            (_KIMI3,),
            thoughts.KIMI3,
            drops=_drops(
                _KIMI3,
                "<|open|>response<|sep|>",
                "<|close|>response<|sep|>",
                "<|close|>message<|sep|>",
                "<|end_of_msg|>",
            ),
            wrapper=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        ),
        (("'argument'", "open_tag"), ("<|open|>argument",)),
    ),
    FormatFamily(
        OutputFormat("glm-4.7", (_GLM_TIGHT,), thoughts.THINK),
        (("</arg_key><arg_value>",),),
    ),
    FormatFamily(
        OutputFormat("glm", (_GLM,), thoughts.THINK),
        (("<arg_key>",),),
    ),
    FormatFamily(
        OutputFormat("seed-oss", (_SEED,), thoughts.SEED, drops=_drops(_SEED)),
        (("<seed:tool_call>",),),
    ),
    FormatFamily(
        OutputFormat(
            "qwen3-coder",
            (_QWEN, JsonCalls(opens=("<tool_call>",), closes=("</tool_call>",))),
            thoughts.THINK,
            drops=_drops(_QWEN),
        ),
        (("<function=", "<parameter="),),
    ),
    FormatFamily(
        OutputFormat("minicpm5", (_MINICPM,), thoughts.THINK),
        (("<function name=", "<param name="),),
    ),
)
