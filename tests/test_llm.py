"""The Python API: a model in this process, asked for texts, conversations, several at once."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapters_help import random_pairs, write_mlx
from api import tiny_folder
from conftest import until

from millrace import LLM
from millrace.errors import (
    AdapterError,
    BadRequest,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    ModelError,
    ModelNotFound,
)

CHAT = [{"role": "user", "content": "Say something."}]
EXACT = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("llm"), default_model)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), context=1024) as made:
        yield made


def test_a_text_is_continued(llm: LLM) -> None:
    answer = llm.generate("One, two,", max_tokens=12, **EXACT)
    assert answer.text and answer.finish_reason == "length"
    assert answer.completion_tokens == 12 and answer.prompt_tokens > 2
    assert llm.generate("One, two,", max_tokens=12, **EXACT) == answer


def test_a_conversation_is_answered(llm: LLM) -> None:
    answer = llm.generate(CHAT, max_tokens=6, **EXACT)
    assert answer.completion_tokens == 6
    assert answer.prompt_tokens > llm.generate("Say something.", max_tokens=1).prompt_tokens


def test_several_prompts_come_back_in_order(llm: LLM) -> None:
    prompts = ["One,", "Two,", CHAT]
    together = llm.generate(prompts, max_tokens=8, **EXACT)
    assert together == [llm.generate(p, max_tokens=8, **EXACT) for p in prompts]


def test_a_stream_is_the_whole_in_pieces(llm: LLM) -> None:
    for prompt in ("One, two,", CHAT):
        pieces = list(llm.stream(prompt, max_tokens=24, **EXACT))
        assert len(pieces) > 1
        assert "".join(pieces) == llm.generate(prompt, max_tokens=24, **EXACT).text


def test_a_stream_that_is_left_stops_the_generation(llm: LLM) -> None:
    stream = llm.stream("One, two,", max_tokens=900, **EXACT)
    next(stream)
    stream.close()
    assert llm.generate("Three,", max_tokens=2, **EXACT).completion_tokens == 2
    assert until(lambda: not llm._model.client.in_flight)


def test_asyncio_has_the_same(llm: LLM) -> None:
    async def both() -> tuple[str, str]:
        whole = await llm.agenerate("One, two,", max_tokens=10, **EXACT)
        assert not isinstance(whole, list)
        pieces = [p async for p in llm.astream("One, two,", max_tokens=10, **EXACT)]
        return whole.text, "".join(pieces)

    whole, streamed = asyncio.run(both())
    assert whole == streamed


def test_sampling_parameters_are_the_requests_own(llm: LLM) -> None:
    one = llm.generate("One,", max_tokens=20, temperature=1.0, seed=7, ignore_eos=True)
    same = llm.generate("One,", max_tokens=20, temperature=1.0, seed=7, ignore_eos=True)
    other = llm.generate("One,", max_tokens=20, temperature=1.0, seed=8, ignore_eos=True)
    assert one.text == same.text != other.text
    greedy = llm.generate("One,", max_tokens=20, **EXACT)
    assert llm.generate("One,", max_tokens=20, temperature=1.0, top_k=1, ignore_eos=True) == greedy
    token = 1000
    biased = llm.generate("One,", max_tokens=3, logit_bias={token: 100.0}, **EXACT)
    assert biased.text == llm._model.tokenizer.decode([token] * 3)


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate("One,", max_tokens=30, **EXACT).text
    stop = whole[len(whole) // 2 :][:4]
    cut = llm.generate("One,", max_tokens=30, stop=[stop], **EXACT)
    assert cut.finish_reason == "stop"
    assert cut.text == whole[: whole.index(stop)]


def test_mistakes_are_raised_and_leave_the_model_as_it_was(llm: LLM) -> None:
    with pytest.raises(TypeError, match="no option 'colour'"):
        llm.generate("One,", colour="red")
    with pytest.raises(TypeError, match="no option 'colour'"):
        next(llm.stream("One,", colour="red"))
    with pytest.raises(ContextLengthExceeded):
        llm.generate("word " * 5000)
    with pytest.raises(BadRequest):
        llm.generate("")
    with pytest.raises(DeadlineExceeded):
        llm.generate("One,", max_tokens=1000, timeout=0.001, ignore_eos=True)
    assert llm.generate("One,", max_tokens=2, **EXACT).completion_tokens == 2


def test_a_folder_that_is_no_model_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        LLM(str(tmp_path))


def test_it_knows_its_name_and_window(llm: LLM, folder: Path) -> None:
    assert llm.name == folder.name
    assert llm.context_window == 1024


def test_two_live_in_one_process_and_one_is_closed(llm: LLM, folder: Path) -> None:
    before = llm.generate("One,", max_tokens=10, **EXACT)
    with LLM(str(folder), context=512, max_running=2) as other:
        assert other.context_window == 512
        assert other.generate("One,", max_tokens=10, **EXACT) == before
        front = other._host._thread
    assert not front.is_alive()
    other.close()
    assert llm.generate("One,", max_tokens=10, **EXACT) == before


def test_an_adapter_is_chosen_by_its_name(folder: Path, tmp_path: Path) -> None:
    shapes = {f"model.layers.{n}.self_attn.q_proj": (32, 32) for n in range(2)}
    path = write_mlx(tmp_path / "one", random_pairs(shapes, size=8.0))
    with LLM(str(folder), context=1024, adapters={"one": str(path)}) as made:
        bare = made.generate("One, two,", max_tokens=12, **EXACT)
        adapted = made.generate("One, two,", max_tokens=12, adapter="one", **EXACT)
        assert adapted.text != bare.text
        streamed = "".join(made.stream("One, two,", max_tokens=12, adapter="one", **EXACT))
        assert streamed == adapted.text
        assert made.generate("One, two,", max_tokens=12, **EXACT) == bare
        with pytest.raises(ModelNotFound, match="one"):
            made.generate("One,", adapter="two")
    with pytest.raises(AdapterError, match="no adapter folder"):
        LLM(str(folder), adapters={"one": str(tmp_path / "nowhere")})


def test_a_closed_engine_has_left_the_process(folder: Path) -> None:
    before = set(threading.enumerate())
    with LLM(str(folder)) as llm:
        llm.generate("One,", max_tokens=2)
        new = [t for t in threading.enumerate() if t not in before]
        (engine,) = (t for t in new if t.name == "millrace-engine")
    assert not engine.is_alive()
    assert not Path(f"/proc/self/task/{engine.native_id}").exists()


def test_one_that_is_closed_says_so(folder: Path) -> None:
    llm = LLM(str(folder))
    left = llm.stream("One,", max_tokens=900, ignore_eos=True)
    next(left)
    llm.close()
    llm.close()
    with pytest.raises(EngineUnavailable, match="shutting down|closed"):
        list(left)
    with pytest.raises(EngineUnavailable, match="This LLM is closed"):
        llm.generate("One,")
    with pytest.raises(EngineUnavailable, match="This LLM is closed"):
        next(llm.stream("One,"))


def test_it_is_closed_under_threads_that_go_on_asking(folder: Path) -> None:
    llm, told = LLM(str(folder)), []

    def work() -> None:
        while True:
            try:
                llm.generate("One, two,", max_tokens=2)
            except EngineUnavailable as error:
                if "closed" in error.message:
                    told.append(error)
                    return

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    closers = [threading.Thread(target=llm.close) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in (*closers, *threads):
        thread.join(60)
    assert len(told) == 4


def test_an_engine_that_nobody_holds_ends(folder: Path) -> None:
    before = set(threading.enumerate())
    llm: LLM | None = LLM(str(folder))
    assert llm and llm.generate("One,", max_tokens=2)
    host = weakref.ref(llm._host)
    llm = None
    gc.collect()
    names = ("millrace-engine", "millrace-front")
    assert until(
        lambda: not [t for t in threading.enumerate() if t not in before and t.name in names]
    )
    gc.collect()
    assert host() is None


def test_options_that_are_not_known_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="weights is one of auto"):
        LLM(str(folder), weights="q3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="task is one of"):
        LLM(str(folder), task="sing")  # type: ignore[arg-type]


BUSY = """
def read():
    try:
        next(llm.stream("word " * 900, max_tokens=900))
    except millrace.errors.EngineUnavailable:
        pass

def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
"""
PROGRAMS = {
    "left open": (
        """
llm = LLM(folder)
for piece in llm.stream("One,", max_tokens=900, ignore_eos=True):
    break
print("ended", flush=True)
""",
        0,
    ),
    "interrupted": (
        """
with LLM(folder) as llm:
    for piece in llm.stream("One,", max_tokens=900, ignore_eos=True):
        print("ended", flush=True)
        raise KeyboardInterrupt
""",
        -2,
    ),
    "interrupted while it loads": (
        """
class Interrupting(millrace.serving.local_model.ThreadConnection):
    def __init__(self, config):
        super().__init__(config)
        print("ended", flush=True)
        interrupt()

millrace.serving.local_model.ThreadConnection = Interrupting
LLM(folder)
""",
        -2,
    ),
    "interrupted while it is closed": (
        """
class Interrupting(millrace.serving.local_model.ThreadConnection):
    closing = False

    async def close(self, grace):
        if not self.closing:
            self.closing = True
            print("ended", flush=True)
            interrupt()
            await asyncio.sleep(0.2)
        await super().close(grace)

millrace.serving.local_model.ThreadConnection = Interrupting
llm = LLM(folder)
threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
llm.close()
""",
        -2,
    ),
    "interrupted while its end is scheduled": (
        """
class Slow(millrace.serving.local_model.ThreadConnection):
    async def close(self, grace):
        await asyncio.sleep(1)
        await super().close(grace)

millrace.serving.local_model.ThreadConnection = Slow
llm = LLM(folder)
loop = llm._host._loop
schedule = loop.call_soon_threadsafe

def interrupted(*args, **options):
    loop.call_soon_threadsafe = schedule
    schedule(*args, **options)
    print("ended", flush=True)
    raise KeyboardInterrupt

loop.call_soon_threadsafe = interrupted
llm.close()
""",
        -2,
    ),
    "interrupted at its end": (
        """
class Interrupting(millrace.serving.local_model.ThreadConnection):
    async def close(self, grace):
        print("ended", flush=True)
        interrupt()
        await asyncio.sleep(0.5)
        await super().close(grace)

millrace.serving.local_model.ThreadConnection = Interrupting
llm = LLM(folder)
threading.Thread(target=read, daemon=True).start()
""",
        130,
    ),
    "cannot load": (
        """
print("ended", flush=True)
LLM(folder, adapters={"none": "/nowhere"})
""",
        1,
    ),
    "forked": (
        """
llm = LLM(folder)
if (child := os.fork()) == 0:
    try:
        llm.generate("One,")
    except millrace.errors.EngineUnavailable as error:
        sys.exit("fork" not in error.message)
assert os.waitpid(child, 0)[1] == 0
print("ended", flush=True)
""",
        0,
    ),
    "closed at its end": (
        """
llm = LLM(folder)
atexit.register(llm.close)
llm.generate("One,", max_tokens=2)
print("ended", flush=True)
""",
        0,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_may_end_under_an_engine_that_works(folder: Path, name: str) -> None:
    program, status = PROGRAMS[name]
    imports = (
        "import asyncio, atexit, os, signal, sys, threading\nimport millrace.serving.local_model"
    )
    text = f"{imports}\nfrom millrace import LLM\nfolder = {str(folder)!r}\n{BUSY}\n{program}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("ended\n"), done.stderr
    assert done.returncode == status, done.stderr
    assert "terminate" not in done.stderr and "ignored" not in done.stderr, done.stderr
