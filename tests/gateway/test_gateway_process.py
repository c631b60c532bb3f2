"""The gateway as a process: what it loads, how it starts and stops, and the official client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import openai
import psutil
import pytest

from tests.fakes.upstream import (
    CHAT,
    DONE,
    STREAM_HEAD,
    USAGE,
    Answer,
    Received,
    chunk,
    event,
    replies,
    streams,
    token,
)
from tests.gateway.harness import KEY, SECRET, Gateway, World, eventually, request_bytes

pytestmark = pytest.mark.asyncio


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def running(redis_url: str, **env: str) -> AsyncIterator[tuple[int, subprocess.Popen[bytes]]]:
    """A gateway process that listens; killed at the end if it still runs."""
    port = free_port()
    process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
        [sys.executable, "-m", "exaserve_ops.gateway"],
        env={
            "PATH": os.environ["PATH"],
            "REDIS_URL": redis_url,
            "EXAOPS_FLEET_SECRET": SECRET.hex(),
            "EXAOPS_GATEWAY_PORT": str(port),
            **env,
        },
        stderr=subprocess.DEVNULL,
    )
    try:
        await eventually(lambda: can_connect(port), 15)
        yield port, process
    finally:
        process.kill()
        process.wait()


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True


def children_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children()


async def at(port: int, world: World) -> Gateway:
    """The process as a gateway that can be asked; its inside is out of reach."""
    gateway = Gateway(port, None, None)  # type: ignore[arg-type] # there is nothing to look into
    world.gateways.append(gateway)
    return gateway


async def test_nothing_of_the_control_plane_is_loaded() -> None:
    code = (
        "import sys, exaserve_ops.gateway.__main__;"
        "print(sorted({m.partition('.')[0] for m in sys.modules}"
        " & {'django', 'psycopg', 'celery', 'channels', 'kombu', 'rest_framework', 'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)  # noqa: ASYNC221 - nothing else runs
    assert done.stdout.strip() == b"[]"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EXAOPS_FLEET_SECRET", "abc"),
        ("EXAOPS_GATEWAY_PORT", "x"),
        ("EXAOPS_GATEWAY_ATTEMPTS", "many"),
        ("REDIS_URL", ""),
    ],
)
async def test_unusable_setting_is_named(name: str, value: str) -> None:
    env = {
        "REDIS_URL": "redis://127.0.0.1:1",
        "EXAOPS_FLEET_SECRET": SECRET.hex(),
        "EXAOPS_GATEWAY_PORT": "1",
        name: value,
    }
    command = [sys.executable, "-m", "exaserve_ops.gateway"]
    done = subprocess.run(command, env=env, capture_output=True, check=False, timeout=20)  # noqa: ASYNC221 - nothing else runs
    assert done.returncode == 2
    assert name.rpartition("_")[2].lower() in done.stderr.decode().lower()
    assert "Traceback" not in done.stderr.decode()


async def test_starts_without_redis_and_says_why_it_cannot_serve(world: World) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}"
    async with running(nowhere, EXAOPS_GATEWAY_FIRST_TABLE_SECONDS="0.1") as (port, _):
        gateway = await at(port, world)
        assert (await gateway.ask(b"", method="GET", path="/health", key=None)).status == 200
        reply = await gateway.ask()
        assert (reply.status, reply.code) == (503, "keys_not_loaded")


async def test_stop_finishes_what_is_open_and_takes_nothing_new(world: World) -> None:
    hold = asyncio.Event()
    engine = await world.engine(streams([token("a"), DONE], hold=hold))
    async with running(world.url, EXAOPS_GATEWAY_POLL_SECONDS="0.2") as (port, process):
        gateway = await at(port, world)
        wire = await gateway.send(request_bytes({"model": "m", "stream": True}))
        await eventually(lambda: engine.requests)
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: not can_connect(port))
        assert process.poll() is None
        hold.set()
        reply = await wire.reply()
        assert reply.complete
        assert reply.body.endswith(DONE)
        await eventually(lambda: process.poll() is not None)
        assert process.returncode == 0
    assert world.redis.xlen("exaops:turns") == 1  # written before it left


async def test_several_processes_serve_one_port_and_one_that_dies_comes_back(world: World) -> None:
    await world.engine(replies(CHAT))
    async with running(world.url, EXAOPS_GATEWAY_PROCESSES="2", EXAOPS_GATEWAY_POLL_SECONDS="0.2") as (
        port,
        parent,
    ):
        gateway = await at(port, world)

        async def wait_for_figures_of_both() -> bytes:
            async with asyncio.timeout(20):
                while True:
                    with contextlib.suppress(OSError):  # one may be about to listen
                        page = (await gateway.ask(b"", method="GET", path="/metrics")).body
                        if b'connections{process="0"}' in page and b'connections{process="1"}' in page:
                            return page
                    await asyncio.sleep(0.05)

        page = await wait_for_figures_of_both()
        assert page.count(b"# TYPE exaops_gateway_connections ") == 1
        for _ in range(20):  # over connections of their own, so that the kernel spreads them
            assert (await gateway.ask()).status == 200
        before = children_of(parent.pid)
        assert len(before) == 2
        before[0].kill()
        await eventually(
            lambda: len(children_of(parent.pid)) == 2 and before[0] not in children_of(parent.pid)
        )
        assert (await gateway.ask()).status == 200
        await wait_for_figures_of_both()
        assert len(world.redis.keys("exaops:reach:*")) == 2  # each speaks for itself
        parent.send_signal(signal.SIGTERM)
        await eventually(lambda: parent.poll() is not None, 15)
        assert parent.returncode == 0
        assert not can_connect(port)


async def test_processes_end_when_their_parent_was_killed(world: World) -> None:
    async with running(world.url, EXAOPS_GATEWAY_PROCESSES="2") as (port, parent):
        await eventually(lambda: len(children_of(parent.pid)) == 2)
        left = children_of(parent.pid)
        parent.kill()
        await eventually(lambda: not any(child.is_running() for child in left), 15)
        assert not can_connect(port)


async def test_port_of_another_gateway_is_not_shared_silently(world: World) -> None:
    async with running(world.url) as (port, _):
        env = {
            "REDIS_URL": world.url,
            "EXAOPS_FLEET_SECRET": SECRET.hex(),
            "EXAOPS_GATEWAY_PORT": str(port),
        }
        command = [sys.executable, "-m", "exaserve_ops.gateway", "--processes", "2"]
        done = subprocess.run(command, env=env, capture_output=True, check=False, timeout=20)  # noqa: ASYNC221 - nothing else runs
        assert done.returncode == 1
        assert b"event=port_in_use" in done.stderr


async def test_slow_client_costs_the_process_a_bounded_amount_of_memory(world: World) -> None:
    piece = chunk(b"data: " + b"x" * 65_536 + b"\n\n")
    sent = 0

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
        nonlocal sent
        writer.write(STREAM_HEAD)
        for _ in range(800):  # 50 MB
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    await world.engine(answer)
    async with running(world.url, EXAOPS_GATEWAY_POLL_SECONDS="0.2") as (port, process):
        gateway = await at(port, world)
        body = {"model": "m", "stream": True}
        watched = psutil.Process(process.pid)
        reader = await gateway.send(request_bytes(body))
        async with asyncio.timeout(30):
            assert len((await reader.reply()).body) > 50_000_000  # one that reads: all buffers are warm
        before, sent = watched.memory_info().rss, 0
        wires = [await gateway.connect() for _ in range(4)]
        for wire in wires:
            wire.set_reading(reading=False)
            await wire.send(request_bytes(body))
        seen = -1
        async with asyncio.timeout(20):
            while seen != sent or not sent:  # until everything between is full
                seen = sent
                await asyncio.sleep(0.3)
        assert watched.memory_info().rss - before < 4 * 2_000_000
        for wire in wires:
            wire.close()


async def test_official_client_works_unchanged(world: World) -> None:
    usage = event(
        {
            "id": "c",
            "object": "chat.completion.chunk",
            "model": "m",
            "created": 1,
            "choices": [],
            "usage": USAGE,
        }
    )
    completion = {
        "id": "c",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": "hi", "finish_reason": "stop", "logprobs": None}],
    }
    engine = await world.engine(replies(CHAT))

    async def use(answer: Answer) -> openai.AsyncOpenAI:
        engine.answer = answer
        return client

    async with running(world.url) as (port, _):
        address = f"http://127.0.0.1:{port}/v1"
        client = openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=10)
        chat = client.chat.completions
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
        plain = await chat.create(model="m", messages=messages)
        assert plain.choices[0].message.content == "hello"
        await use(streams([token("a"), token("b"), usage, DONE]))
        stream = await chat.create(
            model="m", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        pieces = [piece async for piece in stream]
        text = [choice.delta.content for piece in pieces for choice in piece.choices]
        assert text == ["a", "b"]
        assert pieces[-1].usage is not None
        assert pieces[-1].usage.prompt_tokens == 7
        await use(replies(completion))
        assert (await client.completions.create(model="m", prompt="x")).choices[0].text == "hi"
        assert [model.id async for model in client.models.list()] == ["m"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await chat.create(model="other", messages=messages)
        await use(replies({"error": {"message": "too long", "code": "x"}}, status=400))
        with pytest.raises(openai.BadRequestError, match="too long"):
            await chat.create(model="m", messages=messages)
        await use(streams([token("a")], ends=False))
        broken = await chat.create(model="m", messages=messages, stream=True)
        with pytest.raises(openai.APIError, match="middle of the answer"):
            async for _ in broken:
                pass
        stranger = openai.AsyncOpenAI(base_url=address, api_key="sk-wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
        await stranger.close()
        await client.close()
