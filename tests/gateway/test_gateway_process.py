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
import pytest

from tests.fakes.upstream import CHAT, DONE, USAGE, Answer, event, replies, streams, token
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
    async with running(f"redis://127.0.0.1:{free_port()}") as (port, _):
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
