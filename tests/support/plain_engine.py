"""An SGLang server that answers every chat alike, whatever its length, and costs next to nothing.

    python -m tests.support.plain_engine TOKEN… [--after SECONDS]

It prints its URL. The sampled tokens are those that it is given.
"""

import argparse
import asyncio
import json

LIMIT = 256 * 1024 * 1024


async def _serve(tokens: list[int], after_s: float) -> None:
    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                body = await reader.readexactly(length)
                await asyncio.sleep(after_s if length else 0)
                reply = _reply(body, tokens) if length else b"{}"
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(reply), reply)
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, limit=LIMIT)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def _reply(body: bytes, tokens: list[int]) -> bytes:
    ids = body.rpartition(b'"input_ids":[')[2].partition(b"]")[0]
    meta = {
        "id": "r",
        "prompt_tokens": ids.count(b",") + 1,
        "completion_tokens": len(tokens),
        "cached_tokens": 0,
        "weight_version": "1",
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
    }
    message = {"role": "assistant", "content": "fine", "tool_calls": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "meta_info": meta}
    usage = {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": len(tokens)}
    return json.dumps(
        {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
    ).encode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("tokens", type=int, nargs="+")
    parser.add_argument("--after", type=float, default=0.0)
    given = parser.parse_args()
    asyncio.run(_serve(given.tokens, given.after))
