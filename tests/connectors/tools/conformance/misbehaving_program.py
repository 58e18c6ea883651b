"""A client that greets, and then hangs, dies, prints garbage, floods, or does not read. `python … HOW`."""

from __future__ import annotations

import json
import os
import sys
import time

HELLO = {"protocol": 1, "name": "bad", "version": "0", "features": ["canonical", "signing"]}


def main(how: str) -> None:
    """Greet, and misbehave at the next request."""
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] in ("hello", "close"):
            print(json.dumps({"id": request["id"], "ok": HELLO}), flush=True)
            if request["do"] == "close" and how != "stays":
                return
            continue
        print("a last word", file=sys.stderr, flush=True)
        if how in ("hangs", "stays"):
            time.sleep(600)
        elif how == "dies":
            os._exit(7)
        elif how == "garbage":
            print("Traceback: \x1b[31mred", flush=True)
        elif how == "floods":
            while True:
                sys.stdout.write("x" * 65536)
        elif how == "another_id":
            print(json.dumps({"id": 99, "ok": {}}), flush=True)
        elif how == "no_ok":
            print(json.dumps({"id": request["id"], "ok": 1}), flush=True)
        elif how == "twice":
            answer = {"id": request["id"], "ok": {"hmac_sig": "", "canonical_base64": ""}}
            sys.stdout.write(f"{json.dumps(answer)}\n{json.dumps(answer)}\n")
            sys.stdout.flush()
        elif how == "reads_nothing":
            time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
