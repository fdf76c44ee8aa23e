"""Watch chats share a pool that is too small for them: `python -m tools.four_chats --url http://127.0.0.1:8080 [--svg
FILE]`.

Opens the chats at once, shows each one's progress as it streams, tells at the end who finished and how long each was
parked, and draws the run as a timeline. Start the server with a pool that they do not fit, for example `--ctx-size
1024 --parallel 4`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

TOPICS = (
    "a lighthouse keeper",
    "a train that is late",
    "a garden in winter",
    "two brothers and a boat",
    "a lost letter",
)
WIDTH, ROW, LEFT = 760, 34, 70  # of the drawing, in pixels
STREAMING, PARKED = "#4c8bf5", "#f3d9a4"


@dataclass
class Chat:
    """One stream. Times in seconds since the start of all."""

    name: str
    tokens: list[float] = field(default_factory=list)
    parks: list[tuple[float, float]] = field(default_factory=list)  # from, to
    parked_at: float | None = None
    finish: str = "no end"

    def read(self, line: bytes, now: float) -> None:
        """Take in one line of the stream."""
        if line.startswith(b": preempted"):
            self.parked_at = now
        elif line.startswith(b": resumed") and self.parked_at is not None:
            self.parks.append((self.parked_at, now))
            self.parked_at = None
        elif line.startswith(b"data: {"):
            event = json.loads(line[6:])
            choice = (event.get("choices") or [{}])[0]
            if choice.get("delta", {}).get("content"):
                self.tokens.append(now)
            self.finish = choice.get("finish_reason") or (
                event["error"]["message"] if "error" in event else self.finish
            )


async def stream(chat: Chat, url: urllib.parse.SplitResult, prompt_words: int, max_tokens: int, start: float) -> None:
    story = " ".join(f"{chat.name} {number}" for number in range(prompt_words // 5))
    wanted = {
        "messages": [{"role": "user", "content": f"Tell a long story about {chat.name}. Notes: {story}"}],
        "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True,
    }  # fmt: skip
    body = json.dumps(wanted).encode()
    fields = f"Host: {url.netloc}\r\nContent-Length: {len(body)}\r\nConnection: close"
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n\r\n"
    reader, writer = await asyncio.open_connection(url.hostname, url.port or 80)
    writer.write(head.encode() + body)
    while line := await reader.readline():
        chat.read(line, time.monotonic() - start)
    writer.close()


def _progress(chat: Chat) -> str:
    return f"{chat.name:26} {len(chat.tokens):5} tokens  {'paused, waiting for room' if chat.parked_at else ''}"


async def show(chats: list[Chat]) -> None:
    """One line a chat, redrawn while they run; a plain line every few seconds where there is no terminal."""
    is_terminal = sys.stdout.isatty()
    while True:
        lines = [_progress(chat) for chat in chats]
        print(
            "\n".join(f"\x1b[2K{line}" for line in lines) + f"\x1b[{len(lines)}A" if is_terminal else " | ".join(lines)
        )
        await asyncio.sleep(0.1 if is_terminal else 3)


async def run(url: str, count: int, prompt_words: int, max_tokens: int) -> list[Chat]:
    chats = [Chat(TOPICS[number % len(TOPICS)]) for number in range(count)]
    start = time.monotonic()
    showing = asyncio.create_task(show(chats))
    await asyncio.gather(*(stream(chat, urllib.parse.urlsplit(url), prompt_words, max_tokens, start) for chat in chats))
    showing.cancel()
    return chats


def report(chats: list[Chat]) -> str:
    lines = ["\n\n\n\n" if sys.stdout.isatty() else ""]
    for chat in chats:
        parked = sum(end - begin for begin, end in chat.parks)
        lines.append(
            f"{chat.name:26} {len(chat.tokens):5} tokens, parked {len(chat.parks)} times for {parked:.1f} s, "
            f"ends with {chat.finish!r}"
        )
    done = sum(chat.finish in ("stop", "length") for chat in chats)
    return "\n".join([*lines, f"{done} of {len(chats)} chats finished"])


def draw(chats: list[Chat], title: str) -> str:
    """The run as an SVG timeline: blue while a chat streams, yellow while it is parked."""
    end_s = max((chat.tokens[-1] for chat in chats if chat.tokens), default=1.0)
    scale = (WIDTH - LEFT - 20) / end_s  # pixels a second
    bottom = 34 + ROW * len(chats)
    parts = [_box(0, 0, WIDTH, bottom + 44, "#fff"), _text(LEFT, 20, title)]
    for number, chat in enumerate(chats):
        top = 34 + ROW * number
        parts.append(_text(10, top + 15, f"chat {number + 1}"))
        parts.append(_box(LEFT, top, chat.tokens[-1] * scale if chat.tokens else 0, 20, STREAMING))
        parts += [_box(LEFT + begin * scale, top, (end - begin) * scale, 20, PARKED) for begin, end in chat.parks]
        parts.append(_text(LEFT + 6, top + 14, f"{len(chat.tokens)} tokens", "#fff"))
    for tick in range(0, int(end_s) + 1, max(1, int(end_s) // 8)):
        parts.append(_text(LEFT + tick * scale, bottom + 14, f"{tick} s", "#666"))
    parts += [_box(LEFT, bottom + 24, 12, 12, STREAMING), _text(LEFT + 18, bottom + 34, "streams")]
    parts += [_box(LEFT + 90, bottom + 24, 12, 12, PARKED), _text(LEFT + 108, bottom + 34, "paused, waiting for room")]
    body = "\n".join(parts)
    size = f'width="{WIDTH}" height="{bottom + 44}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{text}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument("--svg", type=Path, help="draw the run into this file")
    chosen = parser.parse_args()
    try:
        chats = asyncio.run(run(chosen.url, chosen.chats, chosen.prompt_words, chosen.max_tokens))
    except OSError as error:
        sys.exit(f"no server at {chosen.url}: {error.strerror or error}")
    print(report(chats))
    if chosen.svg is not None:
        title = f"{chosen.chats} chats of {chosen.max_tokens} answer tokens each, on a pool too small for them"
        chosen.svg.write_text(draw(chats, title))


if __name__ == "__main__":
    main()
