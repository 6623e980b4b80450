"""If two agents write to each other at the same time, all arrives, and in order."""

from __future__ import annotations

import json
import socket
import threading

from rankwise.host import network
from rankwise.ipc.channel import knock


def test_what_comes_in_one_piece_with_the_proof_is_not_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def head() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as lines:
                print(json.dumps({"challenge": "n"}), file=lines, flush=True)
                nonce = json.loads(lines.readline())["nonce"]
                proof = {"proof": network.proof("secret", "door", nonce)}
                print(
                    json.dumps(proof), json.dumps({"welcome": "a"}), json.dumps({"start": 1}), sep="\n", file=lines, flush=True
                )
                lines.readline()

        thread = threading.Thread(target=head)
        thread.start()
        link, _, _ = knock(["127.0.0.1"], listener.getsockname()[1], "secret", {"hello": 1})
        assert link.receive() == [{"welcome": "a"}, {"start": 1}]
        link.close("the test is over")
        thread.join(10)
