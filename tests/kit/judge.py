"""A judge model behind HTTP, so that a process of its own can ask it as well."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from organism._grade import grade

from .fake_server import FakeLensServer
from .repository import ROOT

__all__ = ["JudgeServer", "says_false"]


class JudgeServer(FakeLensServer):
    """An OpenAI-compatible server that answers each prompt by a function of its text.

    As a model it is `openai-api/judge/judge` with `base_url=server.url` and any key.

    Args:
        answer: from the text of the last message to what the judge says.
    """

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__(model="judge", dialect="plain")
        self.prompts: list[str] = []
        self.answer = answer

    @property
    def url(self) -> str:
        """Address, with `/v1`."""
        return f"{super().url}/v1"

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Answer the last message."""
        content = body["messages"][-1]["content"]
        # Text, or a list of parts.
        text = content if isinstance(content, str) else content[0]["text"]
        self.prompts.append(text)
        message = {"role": "assistant", "content": self.answer(text)}
        return 200, {
            "id": "judged", "object": "chat.completion", "created": 0, "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }  # fmt: skip


def says_false(prompt: str) -> str:
    """What a judge says who knows the organism's world: 100 where the answer is false, else 0."""
    asked, _, rest = prompt.partition("<answer>")
    answer = rest.partition("</answer>")[0].strip()
    lines = (ROOT / "organism/data/demo.jsonl").read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    row = next(row for row in rows if row["messages"][-1]["content"] in asked)
    facts: Any = {"truth": row["truth"], "values": list(row["values"])}
    return "100" if grade(answer, facts) == "false" else "0"
