"""The messages between workers and server, as bytes and back."""

import json
import math
import socket
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fairseq_async import protocol
from fairseq_async.errors import ProtocolError, RefusedError
from fairseq_async.exchange import Channel
from fairseq_async.exchange.channel import LARGEST
from fairseq_async.method.spec import JsonObject, MethodSpec, ServerSettings
from fairseq_async.protocol import (
    Answer,
    Assignment,
    ErrorReply,
    Greeting,
    Layout,
    MalformedMessageError,
    Push,
    PushReply,
    Report,
    Request,
    Segment,
    Status,
    division,
    encode,
    parse_answer,
    parse_request,
    parsing,
)
from fairseq_async.protocol.client_connection import Connection
from fairseq_async.server.optimizers.learning_rates import LARGEST_TABLE

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)  # JSON has no lone surrogates
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SECONDS = st.floats(0, 1e9)
COUNT = st.integers(0, 1 << 40)
OBJECT: st.SearchStrategy[JsonObject] = st.dictionaries(
    TEXT,
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | FINITE
    | TEXT
    | st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=2),
    max_size=3,
)


def some(cls: type[Any], **others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Messages of a class: ``others`` where the type alone does not say what is allowed, and defaults left out."""
    by_type = {"str": TEXT, "str | None": st.none() | TEXT, "bool": st.booleans(), "int": COUNT, "float": FINITE}
    by_type |= {"int | None": st.none() | COUNT, "float | None": st.none() | FINITE, "Seconds": SECONDS}
    drawn = {
        field.name: others[field.name] if field.name in others else by_type[_name(field.type)]
        for field in fields(cls)
        if field.name in others or field.default is MISSING and field.default_factory is MISSING
    }
    return st.builds(cls, **drawn)


def _name(annotation: Any) -> str:
    return getattr(annotation, "__name__", str(annotation))


SPECS = st.builds(
    MethodSpec,
    method=TEXT,
    workers=COUNT,
    options=OBJECT,
    server=st.builds(ServerSettings, worker_timeout=SECONDS, record=st.booleans()),
    framework=OBJECT,
    grace_period=st.none() | SECONDS,
    shards=st.lists(COUNT, max_size=3),
)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
LAYOUTS = st.builds(Layout, st.lists(st.builds(Segment, TEXT, SHAPES, TEXT), min_size=1, max_size=3).map(tuple)).filter(
    lambda layout: layout.size > 0
)
REPORTS = st.builds(
    Report,
    position=st.none() | OBJECT,
    epochs=SECONDS,
    loss=st.none() | FINITE,
    local_steps=st.none() | COUNT,
    step_seconds=st.none() | SECONDS,
    shard=st.none() | COUNT,
)
ASSIGNMENTS = st.builds(
    Assignment, learning_rate=st.none() | FINITE, local_steps=COUNT, shard=st.none() | COUNT, idle=st.booleans()
)
REQUESTS: st.SearchStrategy[Request] = st.one_of(
    some(protocol.Introduce),
    some(protocol.Hello, spec=SPECS, layout=LAYOUTS),
    some(protocol.Initialise),
    some(protocol.Push, report=REPORTS, norm=st.none() | st.floats(allow_nan=False)),
    some(protocol.Pull),
    some(protocol.WaitForWork),
    some(protocol.ScheduleEvent, event=st.sampled_from(["begin_epoch", "end_epoch"]), loss=st.none() | FINITE),
    some(protocol.SaveState),
    some(protocol.Alive),
    some(protocol.Leave),
)
ANSWERS: st.SearchStrategy[Answer] = st.one_of(
    some(protocol.Greeting),
    some(protocol.Introduced),
    some(protocol.Welcome, version=COUNT, position=st.none() | OBJECT, refused=COUNT, assignment=ASSIGNMENTS),
    some(protocol.PushReply, status=st.sampled_from(Status), assignment=ASSIGNMENTS, norm=st.floats(allow_nan=False)),
    some(protocol.PullReply),
    some(protocol.WorkReply, assignment=ASSIGNMENTS),
    some(protocol.ScheduleReply),
    some(protocol.StateSaved),
    some(protocol.Goodbye),
)


@given(REQUESTS)
def test_a_request_is_parsed_to_an_equal_one(request_: Request) -> None:
    assert parse_request(encode(request_)) == request_


@given(ANSWERS)
def test_an_answer_is_parsed_to_an_equal_one(answer: Answer) -> None:
    assert parse_answer(encode(answer), type(answer)) == answer


@given(REQUESTS, TEXT)
def test_a_field_that_the_protocol_does_not_have_is_malformed(request_: Request, name: str) -> None:
    message = json.loads(encode(request_))
    if name not in message:
        with pytest.raises(MalformedMessageError, match="^malformed message: "):
            parse_request(json.dumps(message | {name: 0}).encode())


@given(REQUESTS, st.data())
def test_a_missing_field_is_malformed(request_: Request, data: st.DataObject) -> None:
    required = [f.name for f in fields(request_) if f.default is MISSING and f.default_factory is MISSING]
    message = json.loads(encode(request_))
    del message[data.draw(st.sampled_from([*required, "kind"]))]
    with pytest.raises(MalformedMessageError, match="^malformed message: "):
        parse_request(json.dumps(message).encode())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence": "0"}, "sequence: Input should be a valid integer"),
        ({"sequence": 0.5}, "sequence: Input should be a valid integer"),
        ({"sequence": True}, "sequence: Input should be a valid integer"),
        ({"weight": "1"}, "weight: Input should be a valid number"),
        ({"pulls": 1}, "pulls: Input should be a valid boolean"),
        ({"report": []}, "report: Input should be"),
        ({"report": {"epochs": -1.0}}, "report: epochs: Input should be greater than or equal to 0"),
        ({"report": {"tokens": math.nan}}, "report: tokens: Input should be a finite number"),
        ({"report": {"tokens": 1e200}}, "report: tokens: Input should be less than or equal to 9007199254740992"),
        ({"report": {"shard": -1}}, "report: shard: Input should be greater than or equal to 0"),
        ({"report": {"mood": "good"}}, "report: mood: Unexpected keyword argument"),
        ({"kind": "pusch"}, "Input tag 'pusch'"),
        ({"kind": None}, "Input tag"),
    ],
)
def test_a_value_of_another_type_is_malformed_and_the_field_is_named(change: dict[str, Any], message: str) -> None:
    body = json.dumps(json.loads(encode(Push(0, 0, 1.0))) | change).encode()
    with pytest.raises(MalformedMessageError) as error:
        parse_request(body)
    assert str(error.value).startswith("malformed message: " + message) and "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["", "-1", "0x1", "G", "0" * 8193])
def test_missing_tensors_are_bounded_hexadecimal_digits(missing: str) -> None:
    with pytest.raises(RefusedError, match="report: missing: "):
        parse_request(encode(Push(0, 0, 1.0, Report(missing=missing))))
    assert parse_request(encode(Push(0, 0, 1.0, Report(missing="f0")))) == Push(0, 0, 1.0, Report(missing="f0"))


@pytest.mark.parametrize("body", [b"[]", b"{}", b"null", b"3", b'"push"'])
def test_json_that_is_no_message_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedMessageError, match="^malformed message: "):
        parse_request(body)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"kind": "pull"', b"pull", b"\x00" * 4])
def test_what_is_not_json_is_no_message_at_all(body: bytes) -> None:
    """The connection is of no use any more: nobody knows where the next message begins."""
    for parse in (parse_request, lambda body: parse_answer(body, Greeting)):
        with pytest.raises(ProtocolError, match="not JSON"):
            parse(body)


def with_layout(segments: str) -> bytes:
    body = encode(protocol.Hello(MethodSpec("x", 1), Layout((Segment("w", (1,), "float32"),)), remote=True))
    message = json.loads(body) | {"layout": {"segments": "HERE"}}
    return json.dumps(message).replace('"HERE"', segments).encode()


def many(item: str, count: int) -> str:
    return ", ".join([item] * count)


ROW = '{"name": "w", "shape": [1], "dtype": "float32"}'


@pytest.mark.parametrize(
    ("body", "mistakes", "said"),
    [
        (with_layout(f"[{many('0', 100_000)}]"), 1, "layout: segments: 0: Input should be an object"),
        (with_layout(f"[{many(ROW, 60_000)}]"), 1, "layout: segments: Tuple should have at most 32768 items"),
        (with_layout(ROW.join("[]").replace("1", many('""', 100_000))), 1, "layout: segments: 0: shape: 0: Input sh"),
        (with_layout(ROW.join("[]").replace("1", many("9", 100_000))), 1, "layout: segments: 0: shape: Tuple should"),
        (with_layout("[]"), 1, "layout: segments: Value error, these tensors are no model"),
        (with_layout(ROW.join("[]").replace("1", "0")), 1, "layout: segments: Value error, these tensors are no model"),
        (f'{{"kind": "alive", {many(chr(34) * 2 + ": 0", 100_000)}}}'.encode(), 100_000, "100000 mistakes"),
    ],
    ids=["segments", "too many segments", "shape", "too long a shape", "no tensor", "no parameter", "names"],
)
def test_a_message_full_of_mistakes_is_refused_at_the_first_or_without_a_look_at_each(
    body: bytes, mistakes: int, said: str
) -> None:
    """Whoever is connected can send it, and nobody else is served meanwhile."""
    with pytest.raises(ValidationError) as found:
        parsing._adapter(parsing._REQUEST).validate_json(body)
    assert found.value.error_count() == mistakes
    with pytest.raises(MalformedMessageError, match=f"^malformed message: {said}"):
        parse_request(body)


@pytest.mark.parametrize("part", ["[]", '"":0', "0", '{"":[{}]}'])
def test_a_message_of_too_many_values_is_refused_unread(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "_adapter", lambda kind: pytest.fail("it is parsed"))
    with pytest.raises(MalformedMessageError, match="more than 524288 values"):
        parse_request(many(part, (1 << 19) + 2).join("[]").encode())


def test_an_error_is_short_whatever_the_peer_has_put_into_it() -> None:
    for body in ({"kind": ["x" * 100_000]}, {"kind": "alive", "x" * 100_000: 0}):
        with pytest.raises(MalformedMessageError) as error:
            parse_request(json.dumps(body).encode())
        assert len(str(error.value)) <= 500


def test_the_largest_table_of_learning_rates_and_a_large_model_are_no_too_large_message() -> None:
    segments = tuple(Segment(f"layer.{number}.weight", (1024, 1024), "float32") for number in range(10_000))
    spec = MethodSpec("x", 1, framework={"rates": [[0.1 + 1e-9 * step] for step in range(LARGEST_TABLE)]})
    body = encode(protocol.Hello(spec, Layout(segments), remote=True))
    assert len(body) < LARGEST and isinstance(parse_request(body), protocol.Hello)


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf, 1e-310, 0.1])
def test_a_norm_and_a_loss_survive_whatever_they_are(norm: float) -> None:
    """The server is to see that an update has NaN, and the worker what became of it."""
    found = parse_request(encode(Push(3, 2, 1.0, Report(loss=norm), norm=norm)))
    assert isinstance(found, Push) and (found.sequence, found.base_version, found.weight) == (3, 2, 1.0)
    assert (repr(found.norm), repr(found.report.loss)) == (repr(norm), repr(norm))
    reply = PushReply(Status.REFUSED, 1, 0, 1, finished=False, assignment=Assignment(), norm=norm, cosine=norm)
    answer = parse_answer(encode(reply), PushReply)
    assert (repr(answer.norm), repr(answer.cosine)) == (repr(norm), repr(norm))


def test_a_refusal_is_raised_and_an_answer_to_another_question_is_a_protocol_error() -> None:
    with pytest.raises(RefusedError, match="^say hello first$"):
        parse_answer(encode(ErrorReply("say hello first")), Greeting)
    with pytest.raises(ProtocolError, match="the server answered greeting where PushReply was expected"):
        parse_answer(encode(Greeting("x")), PushReply)


def test_an_answer_that_came_with_the_one_before_is_waited_for_no_more() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    connection = Connection.__new__(Connection)
    vars(connection).update(vars(theirs))
    ours.queue(b"1")
    ours.queue(b"2")
    ours.flush()
    assert connection.receive() == b"1" and connection.is_readable(0.0)
    assert connection.receive() == b"2" and not connection.is_readable(0.0)
    ours.close()
    theirs.close()


def test_a_request_is_no_answer() -> None:
    with pytest.raises(MalformedMessageError):
        parse_answer(encode(Push(0, 0, 1.0)), PushReply)


def nested(depth: int) -> JsonObject:
    """A position whose lists and mappings lie so deep in it."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return {"at": value}


@pytest.mark.parametrize(
    ("position", "said"),
    [
        (nested(7), None),
        (nested(8), "it is nested deeper than 8 levels"),
        ({"a": [(1 << 63) - 1, -(1 << 63)]}, None),
        ({"a": [[0], [1 << 63]]}, "a number in it has more than 64 bits"),
        ({"a": {"b": -(1 << 63) - 1}}, "a number in it has more than 64 bits"),
        ({"a": "x" * ((1 << 15) - len('{"a": ""}'))}, None),
        ({"a": "x" * ((1 << 15) - len('{"a": ""}') + 1)}, "it has more than 32768 bytes"),
    ],
    ids=["deep", "too deep", "64 bits", "more in a list", "more in a mapping", "long", "too long"],
)
def test_a_position_is_bounded_since_snapshots_and_logs_have_it(position: JsonObject, said: str | None) -> None:
    body = encode(push := Push(0, 0, 1.0, Report(position)))
    if said is None:
        assert parse_request(body) == push
    else:
        with pytest.raises(MalformedMessageError, match=f"report: position: Value error, {said}"):
            parse_request(body)


def test_every_field_of_a_report_and_of_an_assignment_goes_there_and_back() -> None:
    """No two of them are equal."""
    kinds = {"position": {"at": 1}, "payload": "ab", "start_payload": "cd", "missing": "ef", "first_batch": "gh"}
    report = Report(**{each.name: kinds.get(each.name, 3 + at) for at, each in enumerate(fields(Report))})
    push = Push(100, 101, 102.0, report, norm=103.0, pulls=True)
    assert parse_request(encode(push)) == push
    numbers = {each.name: 3 + at for at, each in enumerate(fields(Assignment))}
    assignment = Assignment(**numbers | {"idle": True})
    reply = protocol.WorkReply(False, assignment)
    assert parse_answer(encode(reply), protocol.WorkReply) == reply


SIZES = (4, 4, 8, 0, 3, 3, 2)  # in three fragments: (4, 4), (8, 0) and (3, 3, 2)


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize(("shards", "hosts"), [(1, ""), (2, ""), (2, "a:1,b:2"), (1, "a:1")])
def test_the_parts_of_server_and_hosts_are_the_whole_model_in_its_order(
    fragments: int, shards: int, hosts: str
) -> None:
    layout = Layout(tuple(Segment(f"t{at}", (size,), "float32") for at, size in enumerate(SIZES)))
    options: JsonObject = {} if hosts else {"outer": "nesterov", "fragments": fragments, "local_steps": 6}
    spec = MethodSpec("local_sgd", 2, options, ServerSettings(server_shards=shards, shard_hosts=hosts))
    own, others = division.local_part(spec, layout), division.host_parts(spec, layout)
    assert len(others) == len(spec.server.hosts)
    parts = [own, *others]
    assert [at for part in parts for at in range(len(SIZES))[part.tensors]] == list(range(len(SIZES)))
    assert [at for part in parts for at in range(layout.size)[part.elements]] == list(range(layout.size))
    assert all(part.size == sum(SIZES[part.tensors]) > 0 for part in parts)
    exchanged = division.exchanged(spec, layout)
    assert exchanged == ((own,) if hosts else layout.fragments(spec.fragments))
    for fragment, of_it in zip(layout.fragments(spec.fragments), division.divided(spec, layout), strict=True):
        inside = [at for part in of_it for at in range(fragment.size)[part.elements]]
        with_elements = sum(size > 0 for size in SIZES[fragment.tensors])
        assert inside == list(range(fragment.size)) and len(of_it) == min(spec.server.shards, with_elements)
    with pytest.raises(RefusedError, match="server-shards makes 7 shards: .* 6 tensors"):
        division.divided(replace(spec, server=replace(spec.server, server_shards=7 - len(spec.server.hosts))), layout)


def rows(*given: tuple[str, int, str]) -> Layout:
    return Layout(tuple(Segment(name, (2, size), kind) for name, size, kind in given))


MODEL = rows(("a", 3, "float32"), ("b", 4, "float32"), ("c", 5, "float32"))


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (MODEL, None),
        (rows(("a", 3, "float32"), ("b", 4, "float16"), ("c", 6, "float32")), "its b is 2x4 float32, theirs is 2x4 fl"),
        (rows(("a", 3, "float32"), ("c", 5, "float32")), "theirs lacks b 2x4 float32"),
        (rows(*[(n, 3 + at, "float32") for at, n in enumerate("abcd")]), "it lacks d 2x6 float32"),
        (rows(("a", 3, "float32"), ("c", 5, "float32"), ("b", 4, "float32")), "it has b where theirs has c"),
    ],
)
def test_two_models_that_differ_are_told_apart_by_their_first_difference(theirs: Layout, said: str | None) -> None:
    found = MODEL.difference(theirs)
    assert found is None if said is None else found is not None and found.startswith(said), found
