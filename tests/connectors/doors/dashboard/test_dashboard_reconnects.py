"""The pauses of the dashboard's page before it opens its stream of events again, in Node without a browser."""

from __future__ import annotations

import json

import pytest

from schemas.settings.settings import PROJECT_ROOT
from tests.programs import required_program, run_program

PAGE = PROJECT_ROOT / "connectors" / "doors" / "dashboard" / "page" / "events.js"
# Another module of the page, which Node does not find by its address.
IMPORTED = 'import { get } from "/page/api.js";'
PAUSES = """
const waits = [];
globalThis.setTimeout = (_, wait) => void waits.push(wait);
const { Events } = await import(`data:text/javascript,${encodeURIComponent(process.argv[1])}`);
for (let page = 0; page < 200; page += 1) {
  const events = new Events();
  for (let failure = 0; failure < 4; failure += 1) events.again();
}
console.log(JSON.stringify(waits));
"""


@pytest.mark.node
@pytest.mark.requirement("LM-20")
def test_pages_come_back_at_random_times() -> None:
    source = PAGE.read_text()
    assert IMPORTED in source
    module = source.replace(IMPORTED, "const get = () => undefined;")
    command = [required_program("nodejs", "node"), "--input-type=module", "--eval", PAUSES, module]
    done = run_program(command)
    assert done.returncode == 0, done.stderr
    waits = json.loads(done.stdout)
    for failure, longest_ms in enumerate((600, 1000, 2000, 2000)):
        of_all = waits[failure::4]
        assert longest_ms / 2 <= min(of_all) and max(of_all) <= longest_ms
        assert len({int(wait / 50) for wait in of_all}) >= 3
