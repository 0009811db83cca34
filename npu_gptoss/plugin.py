"""The vLLM entry point (`vllm.general_plugins`), which registers gpt-oss.

vLLM calls `register` in the API server, the engine core, every worker and the subprocess that inspects model classes,
sometimes twice in a process. So importing this module imports only the standard library, and a second `register`
changes nothing.
"""

from __future__ import annotations

import os

from npu_gptoss.serving import logger
from npu_gptoss.serving.releases import RELEASES, installed_vllm, release_of

ARCHITECTURE = "GptOssForCausalLM"
# Seconds until an idle connection is closed. vLLM's 5 equal the limit of OpenAI's clients, whose next request can then
# meet a closing connection; proxies keep connections for 60.
KEEP_ALIVE = ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "75")

_TOLD = "_GPTOSS_MISSPELT_TOLD"  # an environment variable, which the server's other processes inherit


def version_objection(installed: str | None) -> str | None:
    """A sentence if this vLLM is not a supported release; None if it is."""
    if release_of(installed):
        return None
    supported = " or ".join(f"{row.vllm.recommended} ({', '.join(row.devices)})" for row in RELEASES)
    found = f"vLLM {installed} is installed" if installed else "the installed vLLM carries no version"
    return (
        f"npu-gptoss supports vLLM {supported} (and local builds, such as {RELEASES[0].vllm.recommended}+empty), but "
        f"{found}, so vLLM's own gpt-oss model is used. Install vLLM {supported} to use npu-gptoss."
    )


def register() -> None:
    """Registers the model, the MXFP4 checkpoint format and the limits with vLLM, and repairs vLLM's defects.

    Under an unsupported vLLM, or with NPU_GPTOSS=0, it registers nothing and logs that.
    """
    from npu_gptoss import envs

    wrong = envs.unreadable(os.environ)
    if all(error.field != "NPU_GPTOSS" for error in wrong) and not envs.get("NPU_GPTOSS"):
        logger.info("NPU_GPTOSS=0: npu-gptoss leaves everything to vLLM.")
        return
    release = installed_vllm()
    row = release_of(release)
    if row is None:
        logger.warning("%s", version_objection(release))
        return

    from npu_gptoss.serving import children, compat, log_filters
    from npu_gptoss.serving.compat.start import ends

    ends.install()
    if wrong:
        raise wrong[0]
    children.install()
    os.environ.setdefault(*KEEP_ALIVE)
    if os.environ.get(_TOLD) is None:  # once per server, not once per process
        os.environ[_TOLD] = "1"
        for sentence in envs.unknown(os.environ):
            logger.warning("%s", sentence)
    compat.apply()
    log_filters.install()

    from npu_gptoss.serving.releases.vllm import current_platform

    if current_platform.device_type not in row.devices:
        where, served = current_platform.device_type or "this platform", " and ".join(row.devices)
        logger.info("npu-gptoss leaves the model to vLLM on %s; it serves gpt-oss itself on %s.", where, served)
        return

    from npu_gptoss.serving import aside, limits

    row.module("vllm").register_formats()
    limits.register(ARCHITECTURE)
    if not aside.stepped_aside():
        aside.take_over()
