from __future__ import annotations

import sys

import pytest

from npu_gptoss.kernels import load_kernels, signature
from npu_gptoss.kernels.registry import ANY, Priority, RegistrationError, register_kernel, registering_as, registry
from npu_gptoss.kernels.signature import accepts
from tests.kernels.toy import select

FLOAT = signature(x="float32")
GOOD = {
    "solution": "small_ops",
    "signatures": (accepts(x="float32"),),
    "traits": {"size": ANY},
    "priority": Priority.PORTABLE,
}


def add_one(x):
    """Adds one.

    And says more below.
    """
    return x + 1


def test_decorated_function_is_returned_unchanged_and_found(operation):
    assert register_kernel(operation, **GOOD)(add_one) is add_one
    (spec,) = registry.kernels_of(operation)
    assert (spec.name, spec.origin, spec.summary) == ("toy.add.small_ops", "npu_gptoss", "Adds one.")


def test_same_name_is_refused_with_the_owner_of_the_name(operation):
    register_kernel(operation, **GOOD)(add_one)
    with (
        registering_as("other:plugin"),
        pytest.raises(RegistrationError, match=r"taken by npu_gptoss .*other:plugin must"),
    ):
        register_kernel(operation, **GOOD)(lambda x: x)
    assert registry.kernels["toy.add.small_ops"].function is add_one


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"traits": {}}, r"traits must be stated for \['rows', 'size'\], got \['rows'\]"),
        ({"function": "json:loads"}, "needs a summary"),
        ({"traits": {"size": ANY, "sinks": ANY}}, "traits must be stated"),
        ({"traits": {"size": 64}}, "must be a frozenset of values, Range, Where or ANY, got 64"),
        ({"signatures": ()}, "takes no signature"),
        ({"signatures": (accepts(y="float32"),)}, r"must name the roles \['x'\]"),
        ({"priority": -1}, "priority -1 is not within 0..19"),
        ({"priority": 20}, "priority 20 is not within 0..19"),
        ({"priority": 16}, "reserved for plugins"),
    ],
)
def test_a_kernel_that_leaves_something_unsaid_is_refused(operation, change, why):
    with pytest.raises(RegistrationError, match=why):
        register_kernel(operation, **{**GOOD, **change})
    assert registry.kernels_of(operation) == []


def test_a_kernel_that_was_taken_back_is_not_served_from_memory(operation):
    register_kernel(operation, **GOOD)(add_one)
    with registering_as("package:entry"):
        register_kernel(operation, **{**GOOD, "solution": "theirs", "priority": 16})(add_one)

    assert select(operation, call=FLOAT).kernel.solution == "theirs"
    registry.remove_origin("package:entry")
    assert select(operation, call=FLOAT).kernel.solution == "small_ops"


def test_a_function_given_by_its_name_is_imported_at_its_first_call(operation):
    """Or listing kernels would import triton."""
    register_kernel(operation, **GOOD, function="this:no", summary="Prints the Zen of Python.")
    (spec,) = registry.kernels_of(operation)
    assert (spec.summary, spec.module, "this" in sys.modules) == ("Prints the Zen of Python.", "this", False)
    register_kernel(operation, **{**GOOD, "solution": "json"}, function="json:dumps", summary="x")
    run = select(operation, call=FLOAT, override="json")
    assert run(obj=[1]) == "[1]"


def test_equal_priorities_do_not_depend_on_registration_order(operation):
    for name in ("b", "a"):
        register_kernel(operation, **{**GOOD, "solution": name})(lambda x: x)
    assert [k.solution for k in registry.kernels_of(operation)] == ["a", "b"]


def test_every_built_in_kernel_stays_below_the_plugin_band():
    load_kernels()
    assert registry.kernels
    for kernel in registry.kernels.values():
        assert kernel.priority < Priority.PLUGIN
        assert (kernel.priority == Priority.REFERENCE) == (kernel.solution == "reference")
        assert kernel.summary, f"{kernel.name} has no docstring"
        assert kernel.module.startswith("npu_gptoss.")
