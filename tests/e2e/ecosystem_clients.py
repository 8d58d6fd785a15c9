"""Speech-to-text classes of other projects, used as their documentation says; each gives the finals it heard.

None of these packages is needed by Tickertape, so they are imported where they are used.
"""

from __future__ import annotations

import asyncio
from typing import Any

CHUNK_S = 0.05


def pieces(pcm: bytes, rate: int) -> list[bytes]:
    size = round(CHUNK_S * rate) * 2
    return [pcm[start : start + size] for start in range(0, len(pcm), size)]


async def openai_agents(base_url: str, pcm: bytes, pace_s: float) -> list[str]:
    """24 kHz. The session ends by itself when the input does."""
    import numpy as np
    from agents.voice import OpenAISTTModel, StreamedAudioInput, STTModelSettings
    from openai import AsyncOpenAI

    audio = StreamedAudioInput()
    model = OpenAISTTModel("gpt-transcribe", AsyncOpenAI(base_url=base_url, api_key="any"))
    session = await model.create_session(audio, STTModelSettings(), False, False)

    async def speak() -> None:
        for piece in pieces(pcm, 24_000):
            await audio.add_audio(np.frombuffer(piece, np.int16))
            await asyncio.sleep(pace_s)
        await audio.add_audio(None)

    speaking = asyncio.create_task(speak())
    finals = [text async for text in session.transcribe_turns()]
    await speaking
    await session.close()
    return finals


async def _livekit(stt: Any, pcm: bytes, rate: int, pace_s: float, turns: int) -> list[str]:
    from livekit import rtc
    from livekit.agents.stt import SpeechEventType

    stream = stt.stream()

    async def speak() -> None:
        for piece in pieces(pcm, rate):
            stream.push_frame(rtc.AudioFrame(piece, rate, 1, len(piece) // 2))
            await asyncio.sleep(pace_s)

    speaking = asyncio.create_task(speak())
    finals: list[str] = []
    async for event in stream:
        if event.type == SpeechEventType.FINAL_TRANSCRIPT:
            finals.append(event.alternatives[0].text)
            if len(finals) == turns:
                break
    await speaking
    await stream.aclose()
    await stt.aclose()
    return finals


async def livekit_openai(base_url: str, pcm: bytes, pace_s: float, turns: int, **options: Any) -> list[str]:
    """24 kHz. The stream never ends by itself, so the number of turns must be known."""
    from livekit.agents.utils import http_context
    from livekit.plugins import openai

    async with http_context.open():
        stt = openai.STT(base_url=base_url, api_key="any", use_realtime=True, **options)
        return await _livekit(stt, pcm, 24_000, pace_s, turns)


async def livekit_deepgram(base_url: str, pcm: bytes, pace_s: float, turns: int, **options: Any) -> list[str]:
    """16 kHz."""
    from livekit.agents.utils import http_context
    from livekit.plugins import deepgram

    async with http_context.open():
        stt = deepgram.STT(base_url=f"{base_url}/listen", api_key="any", sample_rate=16_000, **options)
        return await _livekit(stt, pcm, 16_000, pace_s, turns)


async def livekit_flux(base_url: str, pcm: bytes, pace_s: float, turns: int, **options: Any) -> list[str]:
    """16 kHz."""
    from livekit.agents.utils import http_context
    from livekit.plugins import deepgram

    async with http_context.open():
        url = base_url.replace("/v1", "/v2/listen").replace("http", "ws", 1)
        stt = deepgram.STTv2(base_url=url, api_key="any", sample_rate=16_000, **options)
        return await _livekit(stt, pcm, 16_000, pace_s, turns)


async def _pipecat(service: Any, pcm: bytes, rate: int, pace_s: float, turns: int) -> list[str]:
    from pipecat.frames.frames import EndFrame, ErrorFrame, InputAudioRawFrame, TranscriptionFrame
    from pipecat.pipeline.pipeline import Pipeline
    from pipecat.pipeline.runner import PipelineRunner
    from pipecat.pipeline.task import PipelineParams, PipelineTask
    from pipecat.processors.frame_processor import FrameProcessor

    finals: list[str] = []
    heard = asyncio.Event()

    class Collector(FrameProcessor):
        async def process_frame(self, frame: Any, direction: Any) -> None:
            await super().process_frame(frame, direction)
            if isinstance(frame, TranscriptionFrame):
                finals.append(frame.text)
                if len(finals) == turns:
                    heard.set()
            await self.push_frame(frame, direction)

    task = PipelineTask(
        Pipeline([service, Collector()]), params=PipelineParams(audio_in_sample_rate=rate), enable_rtvi=False
    )
    errors: list[str] = []

    @service.event_handler("on_error")
    async def on_error(_: Any, error: ErrorFrame) -> None:
        errors.append(error.error)

    async def speak() -> None:
        await asyncio.sleep(0.5)
        for piece in pieces(pcm, rate):
            await task.queue_frame(InputAudioRawFrame(piece, rate, 1))
            await asyncio.sleep(pace_s)
        await heard.wait()
        await task.queue_frame(EndFrame())

    speaking = asyncio.create_task(speak())
    await PipelineRunner(handle_sigint=False).run(task)
    await speaking
    assert not errors, errors
    return finals


async def pipecat_openai(base_url: str, pcm: bytes, pace_s: float, turns: int, **options: Any) -> list[str]:
    """16 kHz, resampled by the client; the server ends turns."""
    from pipecat.services.openai.stt import OpenAIRealtimeSTTService

    url = base_url.replace("http", "ws", 1) + "/realtime"
    settings = OpenAIRealtimeSTTService.Settings(**options) if options else None
    service = OpenAIRealtimeSTTService(
        api_key="any", base_url=url, turn_detection={"type": "server_vad"}, settings=settings
    )
    return await _pipecat(service, pcm, 16_000, pace_s, turns)


async def pipecat_deepgram(base_url: str, pcm: bytes, pace_s: float, turns: int, **options: Any) -> list[str]:
    """16 kHz."""
    from pipecat.services.deepgram.stt import DeepgramSTTService

    settings = DeepgramSTTService.Settings(**options) if options else None
    service = DeepgramSTTService(api_key="any", base_url=base_url.removesuffix("/v1"), settings=settings)
    return await _pipecat(service, pcm, 16_000, pace_s, turns)


async def pipecat_flux(base_url: str, pcm: bytes, pace_s: float, turns: int, **options: Any) -> list[str]:
    """16 kHz. Its eager ends come as frames of their own."""
    from pipecat.services.deepgram.flux.stt import DeepgramFluxSTTService

    url = base_url.replace("/v1", "/v2/listen").replace("http", "ws", 1)
    settings = DeepgramFluxSTTService.Settings(**options) if options else None
    service = DeepgramFluxSTTService(api_key="any", url=url, settings=settings, enable_eager_end_of_turn=True)
    return await _pipecat(service, pcm, 16_000, pace_s, turns)


def _deepgram_client(base_url: str, **options: Any) -> Any:
    from deepgram import AsyncDeepgramClient, DeepgramClientEnvironment

    root = base_url.removesuffix("/v1")
    production = root.replace("http", "ws", 1)
    return AsyncDeepgramClient(
        api_key="any",
        environment=DeepgramClientEnvironment(base=root, production=production, agent=production, agent_rest=root),
        **options,
    )


async def deepgram_file(base_url: str, file: bytes, **options: Any) -> Any:
    """A file, and the answer as the package reads it."""
    import httpx

    async with httpx.AsyncClient() as http:
        return await _deepgram_client(base_url, httpx_client=http).listen.v1.media.transcribe_file(
            request=file, model="nova-3", smart_format=True, utterances=True, **options
        )


async def deepgram_channels(base_url: str, pcm: bytes) -> list[Any]:
    """All that comes for two channels at 16 kHz, as the package reads it."""
    async with _deepgram_client(base_url).listen.v1.connect(
        model="nova-3", encoding="linear16", sample_rate=16_000, channels=2, multichannel=True, vad_events=True
    ) as connection:
        for piece in pieces(pcm, 32_000):
            await connection.send_media(piece)
        await connection.send_close_stream()
        return [message async for message in connection]


async def deepgram_keyterms(base_url: str, pcm: bytes, first: list[str], then: list[str]) -> list[Any]:
    """The audio with some words to expect, and again with others; all that comes, as the package reads it."""
    from deepgram.listen.v1.types import ListenV1Configure

    async with _deepgram_client(base_url).listen.v1.connect(
        model="nova-3", encoding="linear16", sample_rate=16_000, language="de", keyterm=first
    ) as connection:
        messages = []
        for piece in pieces(pcm, 16_000):
            await connection.send_media(piece)
        await connection.send_configure(ListenV1Configure(keyterms=then))
        async for message in connection:
            messages.append(message)
            if message.type == "ConfigureSuccess":
                for piece in pieces(pcm, 16_000):
                    await connection.send_media(piece)
                await connection.send_close_stream()
        return messages


async def deepgram_sdk(base_url: str, pcm: bytes, pace_s: float) -> list[str]:
    """16 kHz. Ends when the server has closed the socket."""
    async with _deepgram_client(base_url).listen.v1.connect(
        model="nova-3", encoding="linear16", sample_rate=16_000, interim_results=True
    ) as connection:

        async def speak() -> None:
            for piece in pieces(pcm, 16_000):
                await connection.send_media(piece)
                await asyncio.sleep(pace_s)
            await connection.send_close_stream()

        speaking = asyncio.create_task(speak())
        results = [message async for message in connection if message.type == "Results" and message.is_final]
        await speaking
    texts = [result.channel.alternatives[0].transcript for result in results]
    return [text for text in texts if text]


async def deepgram_flux(
    base_url: str, pcm: bytes, pace_s: float, then: dict[str, Any] | None = None, **options: Any
) -> list[Any]:
    """All that comes, as the package reads it; 16 kHz. With `then`, the thresholds are changed before the audio."""
    from deepgram.listen.v2.types import ListenV2CloseStream, ListenV2Configure

    async with _deepgram_client(base_url).listen.v2.connect(
        model="flux-general-en", encoding="linear16", sample_rate=16_000, **options
    ) as connection:

        async def speak() -> None:
            if then is not None:
                await connection.send_configure(ListenV2Configure(thresholds=then))
            for piece in pieces(pcm, 16_000):
                await connection.send_media(piece)
                await asyncio.sleep(pace_s)
            await connection.send_close_stream(ListenV2CloseStream())

        speaking = asyncio.create_task(speak())
        messages = [message async for message in connection]
        await speaking
        return messages
