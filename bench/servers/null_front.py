"""The server as it is, in front of an engine that does not compute.

    python bench/servers/null_front.py TOKENIZER PORT

TOKENIZER is a model folder; nothing but its tokenizer and chat template is read.
"""

import asyncio
import gc
import sys
from functools import partial
from pathlib import Path

import uvicorn

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.serve.app import create_app
from quantpipe.serve.engine_process.client import EngineClient
from quantpipe.serve.engine_process.launch import launch_engine
from quantpipe.serve.engine_process.messages import Opening
from quantpipe.serve.server import bind

MAX_OPEN_PROMPTS = 4096
NULL_ENGINE = Path(__file__).with_name("null_engine.py")


async def serve(folder: Path, port: int) -> None:
    engine = EngineClient(Opening(b""), MAX_OPEN_PROMPTS, launch=partial(launch_engine, (str(NULL_ENGINE),)))
    try:
        await engine.start()
        app = create_app(engine, Tokenizer.open(folder), "null")
        gc.freeze()
        with bind("127.0.0.1", port) as listener:
            config = uvicorn.Config(app, log_level="warning", access_log=False)
            await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
