"""Requests with `Upgrade: h2c`, which a server may ignore (RFC 9110, 7.8): they are read as HTTP/1.1, body and all."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import ALL


@repair(
    "http2-offers",
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.on_headers_complete .on_message_complete "
    "._unsupported_upgrade_warning .data_received",
    releases=ALL,
    until="uvicorn repairs its issue 2722",
)
def install_offers(module: ModuleType) -> None:
    """A client that offers HTTP/2 (Java's own, so Spring AI and LangChain4j; Ktor) loses its body and gets 400.

    uvicorn's parser stops behind the headers of such a request and calls it complete, so a new parser reads it again,
    without the offer.
    """
    protocol = module.HttpToolsProtocol
    expect_source(protocol.data_received, "except httptools.HttpParserUpgrade:", "self._unsupported_upgrade_warning()")

    def declined(self: Any) -> bool:  # CONNECT stops the parser, too, without an offer
        return self.parser.should_upgrade() and self._get_upgrade() is not None and not self._should_upgrade()

    for name in ("on_headers_complete", "on_message_complete"):

        @around(protocol, name)
        def unless_declined(original: Original, self: Any) -> None:
            if not declined(self):
                original(self)

    @around(protocol, "_unsupported_upgrade_warning")
    def stopped(original: Original, self: Any) -> None:
        if not declined(self):
            original(self)
            return
        parser = self.parser
        head = [b"%s %s HTTP/%s" % (parser.get_method(), self.url, parser.get_http_version().encode())]
        head += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.npu_gptoss_again = b"\r\n".join([*head, b"", b""]), sys.exc_info()[1].args[0]

    @around(protocol, "data_received")
    def received(original: Original, self: Any, data: bytes) -> None:
        original(self, data)
        while (again := self.__dict__.pop("npu_gptoss_again", None)) is not None:
            head, read = again
            self.parser = module.httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            data = head + data[read:]
            original(self, data)
