"""Media for the tests, made here, and a process that decodes audio and video."""

import io
import os
import re
import wave
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image

RATE = 8000
"""Samples per second of `wav`."""


def png(shade: int, mode: str = "RGB", format: str = "PNG") -> bytes:
    """An image of 3 x 2 pixels, each another one."""
    file = io.BytesIO()
    pixels = (np.arange(18, dtype=np.uint8) * 9 + shade).reshape(2, 3, 3)
    PIL.Image.fromarray(pixels).convert(mode).save(file, format)
    return file.getvalue()


def wav(pitch: int, samples: int = 400) -> bytes:
    """A tone, one channel of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        tone = np.sin(np.arange(samples) * pitch / 50) * 20_000
        out.writeframes(tone.astype("<i2").tobytes())
    return file.getvalue()


def flac(pitch: int, samples: int = 400) -> bytes:
    """The tone of `wav` as FLAC."""
    file = io.BytesIO()
    with av.open(io.BytesIO(wav(pitch, samples))) as source, av.open(file, "w", "flac") as out:
        stream = out.add_stream("flac", rate=RATE)
        for frame in [*source.decode(audio=0), None]:
            out.mux(stream.encode(frame))
    return file.getvalue()


def mp4(shade: int, frames: int = 4) -> bytes:
    """A video of grey frames of 32 x 32 pixels, each lighter than the last."""
    file = io.BytesIO()
    with av.open(file, "w", "mp4") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for i in range(frames):
            grey = np.full((32, 32, 3), shade + 10 * i, np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        out.mux(stream.encode(None))
    return file.getvalue()


class Decoding:
    """A process that has the libraries of FFmpeg which torchcodec looks for.

    They are those that PyAV brings along, under the names they have in a system.
    """

    def __init__(self, directory: Path) -> None:
        bundled = Path(av.__file__).parent.parent / "av.libs"
        for file in (*bundled.glob("libav*.so.*"), *bundled.glob("libsw*.so.*")):
            name, major = re.fullmatch(r"(\w+)-\w+\.so\.(\d+).*", file.name).groups()
            (directory / f"{name}.so.{major}").symlink_to(file)
        assert list(directory.glob("libavcodec.so.*")), f"no libraries of FFmpeg in {bundled}"
        self._path = f"{directory}:{bundled}"
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function`, of a module, returns there."""
        before = os.environ.get("LD_LIBRARY_PATH")
        os.environ["LD_LIBRARY_PATH"] = self._path  # read when the process starts
        try:
            return self._pool.submit(function, *arguments).result(timeout=120)
        finally:
            del os.environ["LD_LIBRARY_PATH"]
            if before is not None:
                os.environ["LD_LIBRARY_PATH"] = before

    def close(self) -> None:
        self._pool.shutdown()
