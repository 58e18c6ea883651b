"""What a listener answered, taken apart into payloads (XP-06), each fit to be sent."""

from __future__ import annotations

from typing import Final

from connectors.xml_payloads.done_messages import Answer, AnswerFault
from connectors.xml_wire.envelope import open_answer
from connectors.xml_wire.xml_faults import Faulty, XmlRefused
from connectors.xml_wire.xml_limits import XmlLimits
from schemas.wire.ids import is_name

_NAMESPACE_LIMIT: Final = 200


def payloads_of(answer: object, limits: XmlLimits) -> list[Answer]:
    """The payloads of an answer: bare, or each in an envelope with its `<to>`. None is no answer.

    Raises AnswerFault, which says what was wrong and quotes nothing.
    """
    if answer is None:
        return []
    if not isinstance(answer, bytes):
        raise AnswerFault(f"a handler answers with bytes or None, not with {type(answer).__name__}")
    try:
        opened = open_answer(answer, limits)
    except XmlRefused as error:
        what = "is too large" if error.reason == "too_large" else "is no XML"
        raise AnswerFault(f"its answer {what}: {error}") from None
    except Faulty as fault:
        raise AnswerFault(f"its answer cannot be sent: {fault.why}") from None
    found = []
    for one in opened:
        if one.to is not None and not is_name(one.to):
            raise AnswerFault("its answer has a <to> that is no name")
        # An underscore may begin an element, but no root tag.
        if not one.root_tag[0].isalpha() or len(one.namespace) > _NAMESPACE_LIMIT:
            raise AnswerFault("its answer has a root tag or a namespace that no listener can have")
        found.append(Answer(one.to, one.root_tag, one.namespace, one.payload.decode("utf-8")))
    return found
