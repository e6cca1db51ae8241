"""`python -m benchmarks.poll URL SECONDS`: how long does `GET /health` take, asked every 5 ms?

Prints a JSON list of milliseconds.
"""

import json
import socket
import sys
import time
from urllib.parse import urlsplit

INTERVAL_S = 0.005


def poll(url: str, seconds: float) -> list[float]:
    """The latencies in ms. A late answer delays the next question, and counts once."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname or "", address.port or 80)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = f"GET /health HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode()
        times = []
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            connection.sendall(request)
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                if not (received := connection.recv(4096)):
                    raise ConnectionError("the server closed the connection")
                answer += received
            times.append((time.perf_counter() - began) * 1000)
            time.sleep(max(0.0, INTERVAL_S - (time.perf_counter() - began)))
    return times


if __name__ == "__main__":
    print(json.dumps(poll(sys.argv[1], float(sys.argv[2]))))
