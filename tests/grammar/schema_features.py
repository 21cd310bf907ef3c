# ruff: noqa: E501  (a table)
"""What JSON schemas can say, keyword by keyword: values that satisfy each, and values that do not."""

from __future__ import annotations

from typing import Any, NamedTuple


class Feature(NamedTuple):
    schema: Any
    valid: list[Any]
    invalid: list[Any]


# fmt: off
FEATURES: dict[str, Feature] = {
    'type': Feature({'type': 'integer'}, [1, -5, 0], ['a', 1.5, None]),
    'types': Feature({'type': ['string', 'null']}, ['a', None], [1, True]),
    'enum': Feature({'enum': ['a', 1, None, {'b': 2}]}, ['a', 1, None, {'b': 2}], ['b', 2, {'b': 3}]),
    'const': Feature({'const': {'a': [1]}}, [{'a': [1]}], [{'a': [2]}]),
    'minimum': Feature({'type': 'integer', 'minimum': 3, 'maximum': 120}, [3, 50, 120], [2, 121, -3]),
    'exclusive': Feature({'type': 'number', 'exclusiveMinimum': 0, 'exclusiveMaximum': 1}, [0.5, 0.25], [0, 1, 1.5, -0.5]),
    'multipleOf int': Feature({'type': 'integer', 'multipleOf': 7}, [7, 14, 0], [8, 1]),
    'multipleOf number': Feature({'type': 'number', 'multipleOf': 0.5}, [0.5, 1.5], [0.3]),
    'length': Feature({'type': 'string', 'minLength': 2, 'maxLength': 4}, ['ab', 'abcd', 'éé'], ['a', 'abcde']),
    'pattern': Feature({'type': 'string', 'pattern': '^[a-c]+$'}, ['abc'], ['abd', '']),
    'pattern search': Feature({'type': 'string', 'pattern': 'b.d'}, ['xxbcdyy', 'bcd'], ['xb']),
    'pattern+length': Feature({'type': 'string', 'pattern': '^a+$', 'maxLength': 3}, ['aaa'], ['aaaa', 'b']),
    'pattern lookahead': Feature({'type': 'string', 'pattern': '^(?=a)[a-z]+$'}, ['abc'], ['bc']),
    'pattern negative lookahead': Feature({'type': 'string', 'pattern': '^(?!foo)[a-z]+$'}, ['bar'], ['foobar']),
    'pattern backreference': Feature({'type': 'string', 'pattern': '^(a|b)\\1$'}, ['aa'], ['ab']),
    'pattern word boundary': Feature({'type': 'string', 'pattern': '\\bfoo\\b'}, ['a foo b'], ['afoo']),
    'pattern unicode class': Feature({'type': 'string', 'pattern': '^\\p{L}+$'}, ['é'], ['1']),
    'format date': Feature({'type': 'string', 'format': 'date'}, ['2024-02-29'], ['2024-13-01']),
    'format date-time': Feature({'type': 'string', 'format': 'date-time'}, ['2024-02-29T12:00:00Z'], ['x']),
    'format time': Feature({'type': 'string', 'format': 'time'}, ['12:00:00Z'], ['x']),
    'format duration': Feature({'type': 'string', 'format': 'duration'}, ['P1D'], ['x']),
    'format email': Feature({'type': 'string', 'format': 'email'}, ['a@b.co'], ['x']),
    'format hostname': Feature({'type': 'string', 'format': 'hostname'}, ['a.b'], ['-']),
    'format ipv4': Feature({'type': 'string', 'format': 'ipv4'}, ['1.2.3.4'], ['1.2.3.400']),
    'format ipv6': Feature({'type': 'string', 'format': 'ipv6'}, ['::1'], ['x']),
    'format uri': Feature({'type': 'string', 'format': 'uri'}, ['http://a/b'], ['x y']),
    'format uuid': Feature({'type': 'string', 'format': 'uuid'}, ['123e4567-e89b-12d3-a456-426614174000'], ['x']),
    'format uri-reference': Feature({'type': 'string', 'format': 'uri-reference'}, ['/a'], []),
    'format json-pointer': Feature({'type': 'string', 'format': 'json-pointer'}, ['/a'], []),
    'format regex': Feature({'type': 'string', 'format': 'regex'}, ['a'], []),
    'format iri': Feature({'type': 'string', 'format': 'iri'}, ['http://é'], []),
    'format x-unknown': Feature({'type': 'string', 'format': 'x-unknown'}, ['z'], []),
    'contentEncoding': Feature({'type': 'string', 'contentEncoding': 'base64'}, ['YQ=='], []),
    'items': Feature({'type': 'array', 'items': {'type': 'integer'}}, [[], [1, 2]], [['a']]),
    'prefixItems': Feature({'type': 'array', 'prefixItems': [{'type': 'integer'}, {'type': 'string'}], 'items': False}, [[1, 'a']], [['a', 1], [1, 'a', 2]]),
    'items list (draft 4)': Feature({'type': 'array', 'items': [{'type': 'integer'}, {'type': 'string'}], 'additionalItems': False}, [[1, 'a']], [['a', 1]]),
    'min/maxItems': Feature({'type': 'array', 'items': {'type': 'integer'}, 'minItems': 1, 'maxItems': 3}, [[1], [1, 2, 3]], [[], [1, 2, 3, 4]]),
    'uniqueItems': Feature({'type': 'array', 'items': {'type': 'integer'}, 'uniqueItems': True}, [[1, 2]], [[1, 1]]),
    'contains': Feature({'type': 'array', 'contains': {'type': 'integer'}}, [['a', 1]], [['a'], []]),
    'unevaluatedItems': Feature({'type': 'array', 'prefixItems': [{'type': 'integer'}], 'unevaluatedItems': False}, [[1]], [[1, 2]]),
    'properties': Feature({'type': 'object', 'properties': {'a': {'type': 'integer'}, 'b': {'type': 'string'}}, 'required': ['a'], 'additionalProperties': False}, [{'a': 1}, {'a': 1, 'b': 'x'}], [{'b': 'x'}, {'a': 1, 'c': 1}]),
    'additionalProperties schema': Feature({'type': 'object', 'additionalProperties': {'type': 'integer'}}, [{'x': 1, 'y': 2}], [{'x': 'a'}]),
    'patternProperties': Feature({'type': 'object', 'patternProperties': {'^a': {'type': 'integer'}}, 'additionalProperties': False}, [{'ab': 1}], [{'ab': 'x'}, {'b': 1}]),
    'propertyNames': Feature({'type': 'object', 'propertyNames': {'pattern': '^[a-z]+$'}}, [{'ab': 1}], [{'A': 1}]),
    'min/maxProperties': Feature({'type': 'object', 'minProperties': 1, 'maxProperties': 2}, [{'a': 1}], [{}, {'a': 1, 'b': 2, 'c': 3}]),
    'minProperties declared': Feature({'type': 'object', 'properties': {'a': {'type': 'integer'}, 'b': {'type': 'integer'}}, 'additionalProperties': False, 'minProperties': 1}, [{'a': 1}, {'b': 1}], [{}]),
    'dependentRequired': Feature({'type': 'object', 'properties': {'a': {'type': 'integer'}, 'b': {'type': 'integer'}}, 'dependentRequired': {'a': ['b']}, 'additionalProperties': False}, [{'b': 1}, {'a': 1, 'b': 1}], [{'a': 1}]),
    'dependentSchemas': Feature({'type': 'object', 'properties': {'a': {'type': 'integer'}}, 'dependentSchemas': {'a': {'required': ['b']}}}, [{'b': 1}], [{'a': 1}]),
    'unevaluatedProperties': Feature({'type': 'object', 'properties': {'a': {'type': 'integer'}}, 'unevaluatedProperties': False}, [{'a': 1}], [{'b': 1}]),
    'anyOf': Feature({'anyOf': [{'type': 'integer'}, {'type': 'string'}]}, [1, 'a'], [None]),
    'oneOf disjoint': Feature({'oneOf': [{'type': 'integer'}, {'type': 'string'}]}, [1, 'a'], [None]),
    'oneOf overlapping': Feature({'oneOf': [{'type': 'integer'}, {'type': 'number'}]}, [1.5], [1]),
    'allOf': Feature({'allOf': [{'type': 'object', 'properties': {'a': {'type': 'integer'}}, 'required': ['a']}, {'properties': {'b': {'type': 'string'}}, 'required': ['b']}]}, [{'a': 1, 'b': 'x'}], [{'a': 1}, {'a': 'x', 'b': 'x'}]),
    'allOf numbers': Feature({'allOf': [{'type': 'integer', 'minimum': 3}, {'maximum': 5}]}, [3, 5], [2, 6]),
    'not': Feature({'not': {'type': 'string'}}, [1], ['a']),
    'if/then/else': Feature({'type': 'object', 'properties': {'k': {'enum': ['a', 'b']}}, 'required': ['k'], 'if': {'properties': {'k': {'const': 'a'}}}, 'then': {'required': ['x']}, 'else': {'required': ['y']}}, [{'k': 'a', 'x': 1}], [{'k': 'a', 'y': 1}]),
    '$ref': Feature({'$defs': {'n': {'type': 'integer'}}, 'type': 'array', 'items': {'$ref': '#/$defs/n'}}, [[1]], [['a']]),
    '$ref recursive': Feature({'$defs': {'n': {'type': 'object', 'properties': {'v': {'type': 'integer'}, 'next': {'anyOf': [{'$ref': '#/$defs/n'}, {'type': 'null'}]}}, 'required': ['v', 'next'], 'additionalProperties': False}}, '$ref': '#/$defs/n'}, [{'v': 1, 'next': {'v': 2, 'next': None}}], [{'v': 1, 'next': 1}]),
    '$ref root': Feature({'type': 'object', 'properties': {'c': {'type': 'array', 'items': {'$ref': '#'}}}, 'additionalProperties': False}, [{'c': [{'c': []}]}], [{'c': [1]}]),
    '$ref siblings': Feature({'$defs': {'n': {'type': 'integer'}}, '$ref': '#/$defs/n', 'minimum': 3}, [3], [2]),
    '$ref percent': Feature({'$defs': {'a/b c': {'type': 'integer'}}, '$ref': '#/$defs/a~1b%20c'}, [3], ['x']),
    '$ref to property': Feature({'type': 'object', 'properties': {'a': {'type': 'integer'}, 'b': {'$ref': '#/properties/a'}}, 'required': ['a', 'b'], 'additionalProperties': False}, [{'a': 1, 'b': 2}], [{'a': 1, 'b': 'x'}]),
    '$anchor': Feature({'$defs': {'n': {'$anchor': 'n', 'type': 'integer'}}, '$ref': '#n'}, [3], ['x']),
    '$id relative': Feature({'$id': 'http://x/y.json', '$defs': {'n': {'$id': 'n.json', 'type': 'integer'}}, '$ref': 'n.json'}, [3], ['x']),
    '$dynamicRef': Feature({'$defs': {'n': {'$dynamicAnchor': 'n', 'type': 'integer'}}, '$ref': '#n'}, [3], ['x']),
    'definitions': Feature({'definitions': {'n': {'type': 'integer'}}, '$ref': '#/definitions/n'}, [3], ['x']),
    'nullable (OpenAPI)': Feature({'type': 'string', 'nullable': True}, ['a'], [1]),
    'annotations': Feature({'type': 'integer', 'title': 't', 'description': 'd', 'default': 1, 'examples': [1], 'deprecated': True, 'readOnly': True, '$comment': 'c', '$schema': 'https://json-schema.org/draft/2020-12/schema'}, [1], ['x']),
    'unknown keyword': Feature({'type': 'integer', 'x-mine': 3}, [1], ['x']),
    'empty': Feature({}, [1, 'a', {'a': [None]}], []),
    'false property': Feature({'type': 'object', 'properties': {'a': False, 'b': {'type': 'integer'}}}, [{'b': 1}], [{'a': 1}]),
    'required undeclared': Feature({'type': 'object', 'properties': {'a': {'type': 'integer'}}, 'required': ['a', 'z']}, [{'a': 1, 'z': 2}], [{'a': 1}]),
    'enum in union type': Feature({'type': ['string', 'null'], 'enum': ['a', None]}, ['a', None], ['b']),
    'no type, properties': Feature({'properties': {'a': {'type': 'integer'}}}, [{'a': 1}, 3], [{'a': 'x'}]),
    'no type, minLength': Feature({'minLength': 2}, ['ab', 3], ['a']),
}
# fmt: on
