"""Every call that NVIDIA's Python package makes of ``transformer_engine_torch``, read from its source, binds to a function of ``fusible.tex`` and of
the inventory."""

from __future__ import annotations

import ast
import inspect

import pytest
from te_source import LACKING, Use, members, sources, uses

from fusible import tex
from fusible.conformance import read_inventory

INVENTORY = read_inventory("2.20.2")
"""Of the version that is installed for the tests."""


def bind(use: Use, signature: inspect.Signature) -> None:
    """Raise ``TypeError`` unless the call fits the signature; arguments of unknown number (``*args``) may be any."""
    assert use.call is not None
    given = [argument for argument in use.call.args[use.skipped :] if not isinstance(argument, ast.Starred)]
    positional = [0] * (len(given) + use.skipped)
    (signature.bind if use.complete else signature.bind_partial)(*positional, **dict.fromkeys(use.keywords, 0))


def calls() -> list[Use]:
    return [use for use in uses() if use.call is not None and inspect.isfunction(getattr(tex, use.name, None))]


def test_every_name_that_the_package_reads_is_there() -> None:
    missing = {use.name: use.where for use in uses() if not hasattr(tex, use.name)}
    assert missing.keys() == LACKING


def test_every_call_of_the_package_binds() -> None:
    refused: dict[str, str] = {}
    for use in calls():
        try:
            bind(use, inspect.signature(getattr(tex, use.name)))
        except TypeError as error:
            refused[f"{use.where} {use.name}"] = str(error)
    assert not refused
    assert len(calls()) > 220 and len({use.name for use in calls()}) > 130, (len(calls()), len({use.name for use in calls()}))


def test_every_name_and_member_that_the_package_reads_is_in_the_inventory_and_served() -> None:
    assert {use.name for use in uses()} - set(INVENTORY.all) == LACKING
    read = {(owner, member): where for owner, member, where in members()}
    of_enumerations = {pair for pair in read if pair[0] in INVENTORY.enumerations}
    assert not {pair: read[pair] for pair in of_enumerations if pair[1] not in INVENTORY.enumerations[pair[0]]}
    assert not {pair: read[pair] for pair in of_enumerations if pair[1] not in getattr(tex, pair[0]).__members__}
    others = {pair for pair in read if pair[0] not in INVENTORY.enumerations}
    assert others == {(module, name) for module, names in INVENTORY.submodules.items() for name in names}
    assert len(of_enumerations) > 70


def test_every_call_of_the_package_binds_to_the_inventory() -> None:
    """Nobody passes by name what NVIDIA's binding takes by position alone."""
    refused: dict[str, str] = {}
    for use in calls():
        function = INVENTORY.functions[use.name]
        if use.keywords and not function.by_keyword:
            refused[f"{use.where} {use.name}"] = f"is given {', '.join(use.keywords)} by name"
        try:
            bind(use, function.signature)
        except TypeError as error:
            refused[f"{use.where} {use.name}"] = str(error)
    assert not refused
    passed = {(use.name, keyword) for use in calls() for keyword in use.keywords}
    assert len(passed) > 50 and all(keyword in inspect.signature(getattr(tex, name)).parameters for name, keyword in passed)


def test_every_communicator_of_the_package_binds_to_the_inventory() -> None:
    made = [use for use in uses() if use.call is not None and use.name in INVENTORY.classes]
    assert {use.name for use in made} >= {"CommOverlap", "CommOverlapP2P", "CommOverlapHelper"}
    for use in made:
        fits = 0
        for parameters in INVENTORY.classes[use.name].constructors:
            kinds = [inspect.Parameter(p.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=p.default) for p in parameters]
            try:
                bind(use, inspect.Signature(kinds))
            except TypeError:
                continue
            fits += 1
        assert fits == 1, use


@pytest.mark.parametrize(("mirror", "enumeration", "prefix"), [("DType", "DType", ""), ("FusedAttnBackend", "NVTE_Fused_Attn_Backend", "NVTE_")])
def test_enumerations_that_the_package_mirrors_have_its_members(mirror: str, enumeration: str, prefix: str) -> None:
    """The package compares the members with its own, and does not import with one more or less."""
    classes = [node for path in sources() for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef) and node.name == mirror]
    (found,) = (node for node in classes if any(ast.unparse(base).endswith("IntEnum") for base in node.bases))
    own = {target.id for node in found.body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)}
    assert {prefix + name for name in own} == set(INVENTORY.enumerations[enumeration])


@pytest.mark.parametrize(("name", "arguments"), [("nvfp4_group_quantize_with_amax", 8), ("get_fused_attn_backend", 1), ("thd_out_correction", 8)])
def test_what_nvidia_takes_by_position_binds_by_position(name: str, arguments: int) -> None:
    parameters = inspect.signature(getattr(tex, name)).parameters
    assert sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values()) == arguments == len(INVENTORY.functions[name].parameters)
    inspect.signature(getattr(tex, name)).bind(*[0] * arguments)


def test_what_has_no_default_behind_a_default_is_refused_when_missing() -> None:
    with pytest.raises(TypeError, match="rowwise_amax of nvfp4_group_quantize_with_amax: expected a tensor, got None"):
        tex.nvfp4_group_quantize_with_amax(None, None, 1, None)
