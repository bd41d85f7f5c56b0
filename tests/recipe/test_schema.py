"""Schema checks against the jsonschema library as an independent judge, and the strict subset."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepseek_recipe.schema.check import check_schema
from deepseek_recipe.schema.ecma_regex import check_pattern
from deepseek_recipe.schema.limits import MAX_NODES, SchemaError, TimeLimit
from deepseek_recipe.schema.strict import strict_parameters, strict_schema

DRAFTS = {
    "http://json-schema.org/draft-04/schema#": jsonschema.Draft4Validator,
    "http://json-schema.org/draft-06/schema#": jsonschema.Draft6Validator,
    "http://json-schema.org/draft-07/schema#": jsonschema.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema.Draft201909Validator,
    "https://json-schema.org/draft/2020-12/schema": jsonschema.Draft202012Validator,
}
KEYWORDS = st.sampled_from(
    ["type", "properties", "items", "prefixItems", "required", "enum", "const", "anyOf", "allOf", "not", "if",
     "contains", "additionalProperties", "additionalItems", "patternProperties", "propertyNames", "dependentRequired",
     "dependencies", "dependentSchemas", "minimum", "exclusiveMinimum", "multipleOf", "minLength", "maxItems",
     "uniqueItems", "title", "description", "format", "default", "examples", "$defs", "definitions",
     "readOnly", "deprecated", "unknown"]
)  # fmt: skip
LEAVES = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        1.5,
        2.0,
        "",
        "a",
        "string",
        "object",
        [],
        ["a"],
        ["a", "a"],
        ["string", "null"],
        [1],
        {},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(KEYWORDS, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2)
        | st.lists(inner, max_size=2)
    ),
    max_leaves=8,
)


def is_accepted(schema: Any) -> bool:
    try:
        check_schema(schema)
    except SchemaError:
        return False
    return True


@pytest.mark.parametrize("uri", DRAFTS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(keywords=st.dictionaries(KEYWORDS, SCHEMAS, max_size=4))
def test_the_table_of_rules_agrees_with_the_meta_schemas(uri: str, keywords: dict[str, Any]) -> None:
    schema = {"$schema": uri, **keywords}
    try:
        DRAFTS[uri].check_schema(schema)
    except jsonschema.SchemaError:
        assert not is_accepted(schema)
    else:
        assert is_accepted(schema)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"type": "foo"}}}, '#/properties/a/type must be .* not "foo"'),
        ({"minLength": -1}, "#/minLength must be an integer from 0 up, not -1"),
        ({"pattern": "("}, r"#/pattern must be a regular expression \(unclosed \( at 0\)"),
        ({"patternProperties": {"[": {}}}, "#/patternProperties"),
        ({"$ref": "#/$defs/a"}, "'#/\\$defs/a' points at nothing"),
        ({"$ref": "https://example.com/schema.json"}, "nothing is fetched"),
        ({"$ref": "other.json"}, "nothing is fetched"),
        ({"$ref": "#name"}, "no anchor is named 'name'"),
        ({"$schema": "http://example.com/"}, "no known meta-schema"),
        (5, "# must be an object or a boolean, not 5"),
        ({"properties": {"a/b~c": {"type": 5}}}, "#/properties/a~1b~0c/type"),
    ],
)
def test_a_bad_schema_names_the_place_and_the_rule(schema: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}},
        {"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}},
        {"$id": "https://example.com/root", "$ref": "item", "$defs": {"a": {"$id": "item", "type": "string"}}},
        {
            "$id": "https://example.com/root",
            "properties": {"a": {"$ref": "https://example.com/root#/$defs/a"}},
            "$defs": {"a": True},
        },
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        {"items": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": {}}},
        {"pattern": "^(?<year>\\d{4})-\\p{L}\\1(?=x)(?<!y)[^\\]-]\\u{1F600}\\/$"},
    ],
)
def test_self_contained_schemas_are_accepted(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "[", "[b-a]", "[\\d-z]", "*", "a**", "a{2,1}", "{", "[^]", "\\1", "\\0", "\\", "\\q",
     "(?<a>x)(?<a>y)", "|*", "(?<=a)*", "\\x1", "\\u12", "\\" + "1" * 5_000, "a{" + "1" * 5_000 + "}",
     "\\u{110000}", "\\uD800",
     "[\\U{DFFF}]", "\\p{Foo}", "[\\pX]", "a{300001}", "((a{1,999}b){999}){2}",
     "(" * 300 + ")" * 300, "a" * 70_000],
)  # fmt: skip
def test_bad_patterns_are_explained(pattern: str) -> None:
    assert check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["a{300000}", "a{ 2 , 3 }", "(a{500}){500}", "a{0,}b{0}", "\\x{41}\\U00000041\\U{41}[\\u{0000041}-z]",
     "\\p{Greek}\\p{L}\\P{Lu}[\\p{Script=Latin}]", "(?iR)a(?u:b)"],
)  # fmt: skip
def test_good_patterns_are_accepted(pattern: str) -> None:
    assert check_pattern(pattern) is None


def test_checking_a_pattern_never_runs_it() -> None:
    start_s = time.process_time()
    assert check_pattern("(a+)+" * 5_000 + "(x{1,9}){1,9}" * 1_000) is None
    assert time.process_time() - start_s < 2


@pytest.mark.bad_input
def test_a_schema_has_a_bounded_number_of_parts() -> None:
    schema = {"properties": {str(number): {} for number in range(MAX_NODES + 1)}}
    start_s = time.process_time()
    with pytest.raises(SchemaError, match=str(MAX_NODES)):
        check_schema(schema)
    assert time.process_time() - start_s < 5


class Clock:
    """A clock that goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("check", "schema"),
    [
        (check_schema, {"properties": {str(number): {} for number in range(12)}}),
        (check_schema, {"$ref": "#", "allOf": [{"$ref": "#"}] * 5}),
        (check_schema, {"patternProperties": dict.fromkeys(map(str, range(12)), True)}),
        (check_schema, {"$schema": "http://json-schema.org/draft-04/schema#", "enum": list(range(12))}),
        (strict_schema, {"type": "object", "properties": {str(number): {"type": "null"} for number in range(12)}}),
    ],
    ids=["nodes", "references", "patterns", "enum", "strict"],
)
def test_a_check_ends_in_time(check: Any, schema: Any) -> None:
    with pytest.raises(SchemaError, match=r"limit of 10 s .* ConversionOptions\(schema_time_limit_s"):
        check(schema, TimeLimit(10.0, Clock()))
    check(schema, TimeLimit(100.0, Clock()))


D4, D7 = "http://json-schema.org/draft-04/schema", "http://json-schema.org/draft-07/schema"
D2019, D2020 = "https://json-schema.org/draft/2019-09", "https://json-schema.org/draft/2020-12"


@pytest.mark.parametrize(
    ("schema", "is_accepted"),
    [
        ({"$ref": f"{D2020}/schema#meta"}, True),
        ({"$ref": f"{D2020}/meta/core#/$defs/anchorString"}, True),
        ({"$ref": f"{D2020}/schema#/$defs/x"}, False),
        ({"$ref": f"{D2020}/schema#nope"}, False),
        ({"$ref": f"{D2020}/meta/nope"}, False),
        ({"$ref": D7}, False),  # the meta-schema of another draft
        ({"$schema": D7, "$ref": f"{D7}#/definitions/nonNegativeInteger"}, True),
        ({"$schema": D7, "$ref": f"{D2020}/schema"}, False),
        ({"$schema": f"{D2019}/schema", "$ref": f"{D2019}/meta/format"}, True),
        ({"$schema": f"{D2019}/schema", "$recursiveRef": "#", "$recursiveAnchor": True}, True),
        ({"$schema": f"{D2019}/schema", "$recursiveRef": "a b"}, False),
        ({"$schema": f"{D2019}/schema", "$recursiveAnchor": 5}, False),
        ({"$recursiveAnchor": True}, False),
        ({"$schema": ""}, True),
        ({"$schema": "http://json-schema.org/schema#"}, True),
        ({"$schema": D7.replace("http", "https"), "if": 5}, False),
        ({"$schema": f"{D2020}/schema".replace("https", "http"), "prefixItems": 5}, False),
        ({"$schema": f"{D7}##"}, False),
        ({"$schema": f"{D4}##", "if": 5}, True),
        ({"$schema": "ftp" + D7[4:]}, False),
    ],
)
def test_a_schema_may_name_its_draft_and_refer_to_its_meta_schemas(schema: Any, is_accepted: bool) -> None:
    if is_accepted:
        check_schema(schema)
    else:
        with pytest.raises(SchemaError):
            check_schema(schema)


@pytest.mark.bad_input
@pytest.mark.parametrize("keyword", ["$id", "$ref", "$dynamicRef"])
def test_an_endless_reference_is_refused_before_it_is_taken_apart(keyword: str) -> None:
    with pytest.raises(SchemaError, match="at most 65536 characters"):
        check_schema({keyword: "../" * 30_000})


@pytest.mark.bad_input
def test_long_base_addresses_do_not_make_a_check_slow() -> None:
    properties = {f"p{number}": {"$ref": "#/properties/p1"} for number in range(90_000)}
    start_s = time.monotonic()
    with pytest.raises(SchemaError, match=r"limit of 0\.2 s"):
        check_schema({"$id": f"http://a/{'x' * 60_000}/", "properties": properties}, TimeLimit(0.2))
    assert time.monotonic() - start_s < 5


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://["},
        {"$id": "http://["},
        {"$id": "a b"},
        {"$id": "1:x"},
        {"$id": "http://a:b/"},
        {"$ref": "#/$defs/a b", "$defs": {"a b": {}}},
        {"$ref": "#/$defs/a%2", "$defs": {"a%2": {}}},
        {"$ref": "#/anyOf/" + "1" * 5_000, "anyOf": [{}]},
        {"$ref": "#/x", "x": {"type": 5}},
        {"minimum": float("nan")},
    ],
)
def test_what_no_reader_can_follow_is_a_schema_error(schema: Any) -> None:
    with pytest.raises(SchemaError):
        check_schema(schema)


def test_what_a_reference_points_at_is_a_schema_wherever_it_stands() -> None:
    check_schema({"$ref": "#/x/y", "x": {"y": {"type": "string"}}})
    check_schema({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"$ref": "#/$defs/a%20b"}}})


@pytest.mark.bad_input
def test_errors_show_little_of_what_was_sent() -> None:
    long = "x" * 10_000
    for schema in ({"type": long}, {"$ref": long}, {"properties": {long: {"type": 5}}}, {"$schema": long}, [long]):
        with pytest.raises(SchemaError, match=r"…, 10[0-9]{3} characters") as caught:
            check_schema(schema)
        assert len(str(caught.value)) < 700


# ---- strict ----------------------------------------------------------------------------------------------------------


def test_a_strict_object_requires_all_its_properties_and_no_others() -> None:
    schema = {
        "title": "dropped",
        "description": "top",
        "properties": {
            "b": {"type": "string", "minLength": 1, "format": "uuid"},
            "a": {"$ref": "#/x", "description": "d"},
        },
        "type": "object",
    }
    assert json.dumps(strict_parameters(schema)) == json.dumps(
        {
            "type": "object",
            "properties": {"b": {"type": "string", "format": "uuid"}, "a": {"$ref": "#/x"}},
            "additionalProperties": False,
            "required": ["b", "a"],
            "description": "top",
        }
    )
    assert strict_parameters(None) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
        "required": [],
    }


def top(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (top(a={}), "#/properties/a needs a type, anyOf or \\$ref"),
        (top(a={"type": "object"}), "#/properties/a is an object without properties"),
        (top(a={"type": "array"}), "without items"),
        (top(a={"type": ["string", "object"]}), "a list of types"),
        (top(a={"anyOf": [{"$ref": "#"}]}), "#/properties/a/anyOf/0"),
        (top(a={"type": "integer", "minimum": 1.5}), "minimum must be of type integer"),
        (top(a={"type": "string", "enum": [1]}), "enum may hold only strings"),
        (top(a={"type": "string", "format": "date"}), "format must be one of"),
        ({**top(a={"type": "null"}), "required": ["a", "b"]}, "every property exactly once: a"),
        ({**top(a={"type": "null"}), "additionalProperties": {}}, "additionalProperties must be false"),
        ({"type": "array"}, 'of type "object" at the top'),
    ],
)
def test_what_strict_schemas_cannot_say_is_explained(schema: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        strict_parameters(schema)


@pytest.mark.bad_input
def test_a_strict_answer_has_properties() -> None:
    with pytest.raises(SchemaError, match="without properties"):
        strict_schema({"type": "object"})
