"""Reports vLLM's platform and model class after all plugins are loaded: `python -m npu_gptoss.serving.registered`.

Prints a JSON object: `device`, the type of vLLM's platform; `model`, the class that serves gpt-oss. `npu-gptoss doctor`
runs it in a separate process; it opens no device.
"""

from __future__ import annotations

import json

from npu_gptoss.model.config_fields import ARCHITECTURE


def registered() -> dict[str, str]:
    from npu_gptoss.serving.releases.vllm import ModelRegistry, current_platform, load_general_plugins

    load_general_plugins()
    known = ModelRegistry.models.get(ARCHITECTURE)
    return {
        "device": current_platform.device_type,
        "model": f"{known.module_name}:{known.class_name}" if hasattr(known, "module_name") else repr(known),
    }


if __name__ == "__main__":
    print(json.dumps(registered()))
