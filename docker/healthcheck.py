"""Exits with 0 if the server answers /health: the images' HEALTHCHECK, because some images lack curl.

It asks where the running `vllm serve` listens, because the container's own options may name another port than PORT;
of several, the one at PORT.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request

from npu_gptoss.doctor.exposure import local_url, servers
from npu_gptoss.doctor.machine import Machine

# The server runs in this container, so the user's proxy is bypassed, and its certificate is of another name.
ITS_OWN = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), ITS_OWN)


def main(here: Machine | None = None) -> int:
    host, port = "127.0.0.1", os.environ.get("PORT", "8000")
    running = [
        (server.option("--host", "0.0.0.0"), server.option("--port", "8000")) for server in servers(here or Machine())
    ]
    if running:
        host, port = next((place for place in running if place[1] == port), running[0])
    for secure in (False, True):  # --ssl-certfile
        url = f"{local_url(host, port, secure)}/health"
        try:
            with DIRECT.open(url, timeout=2) as response:
                healthy = response.status == 200
        except (urllib.error.URLError, OSError, ValueError) as error:
            print(f"{url}: {error}")
            if isinstance(error, urllib.error.HTTPError):
                return 1
            continue
        print(f"{url}: {'healthy' if healthy else 'not healthy'}")
        return int(not healthy)
    return 1


if __name__ == "__main__":
    sys.exit(main())
