"""A rank process without torch, for tests of the life cycle: echoes messages until its parent ends."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from deepinfer_core.parallel.channel import Channel, Inbox


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    channel = Channel.from_descriptor(parser.parse_args().channel, "the test")
    inbox = Inbox(channel, exit_after_s=0.5)
    while not inbox.is_closed:
        for message in inbox.take(60.0):
            if message == b"die":
                print("the last words", flush=True)
                sys.exit(7)
            if message == b"kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if message == b"sleep":
                time.sleep(600)  # as one that is stuck: only the inbox's thread can end it
            if message == b"rank":
                message = f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}".encode()
            channel.send(message)


if __name__ == "__main__":
    main()
