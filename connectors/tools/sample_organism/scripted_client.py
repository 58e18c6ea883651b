"""The researcher's client of a language model, without a model: it always follows the same script.

It calls all its tools at once, waits until each has answered or failed, and reports the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.sax.saxutils import escape

from connectors.doors.xml_pump.listener_table import ChatMessage, Completion, ToolCall
from connectors.tools.sample_organism.payloads import NAMESPACE

_CALCULATOR: Final = "calculator"
_SUM: Final = {"operation": "multiply", "first": "6", "second": "7"}
_WORDS: Final = {"query": "log mailbox"}
_TOKENS: Final = 100


class ScriptedClient:
    """A stand-in for a client of a language model, for the sample's listener `researcher`."""

    async def complete(
        self,
        model: str,
        system_prompt: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> Completion:
        """Return the next step of a fixed script, as a language model would complete the conversation.

        The step depends on the messages since the last one of role `user`. First come the calls of all `tools`.
        After the answers of all tools comes the text of a `<report>`. While answers are missing, and after the
        report, the completion is empty. `model` and `system_prompt` are ignored.
        """
        names = [str(tool["name"]) for tool in tools]
        last_question = max((n for n, one in enumerate(messages) if one.role == "user"), default=0)
        since = messages[last_question + 1 :]
        answers = {one.name: one.content for one in since if one.role == "tool"}
        if not any(one.role in ("assistant", "tool") for one in since) and names:
            calls = [ToolCall(name, _SUM if name == _CALCULATOR else _WORDS) for name in names]
            return Completion(calls=calls, tokens=_TOKENS)
        if set(answers) >= set(names) and not any(
            f'<report xmlns="{NAMESPACE}"' in one.content for one in since
        ):
            return Completion(text=_report(answers), tokens=_TOKENS)
        return Completion(tokens=_TOKENS)


def _report(answers: Mapping[str, str]) -> str:
    said = "".join(
        f'<finding by="{escape(name)}">{escape(answers[name])}</finding>' for name in sorted(answers)
    )
    return f'<report xmlns="{NAMESPACE}">{said}</report>'
