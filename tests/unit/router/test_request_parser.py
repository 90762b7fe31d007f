import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshuttle.config import EngineRole, EngineSpec, RouterConfig
from kvshuttle.router.http_text import Request
from kvshuttle.router.request_parser import Refusal, RequestParser

ENGINES = (
    EngineSpec.parse("http://127.0.0.1:1,127.0.0.1:2", EngineRole.PREFILL, 0),
    EngineSpec.parse("http://127.0.0.1:3,127.0.0.1:4", EngineRole.DECODE, 0),
)
CONFIG = RouterConfig(ENGINES, max_header_bytes=1024, max_body_bytes=2048)


def parse(*pieces: bytes) -> list[Request | Refusal]:
    parser = RequestParser(CONFIG)
    for piece in pieces:
        parser.feed(piece)
    return list(parser.arrived)


def refused(*pieces: bytes) -> int:
    arrivals = parse(*pieces)
    assert len(arrivals) == 1
    assert isinstance(arrivals[0], Refusal)
    return arrivals[0].status


POST = (
    b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\nhello"
)


def test_a_request_is_understood():
    (request,) = parse(POST)
    assert request == Request(
        b"POST",
        b"/v1/completions",
        [(b"host", b"h"), (b"content-type", b"application/json"), (b"content-length", b"5")],
        b"hello",
        True,
        False,
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 3 * len(POST)), max_size=10))
def test_pipelined_requests_are_the_same_however_they_are_cut(cuts):
    data = POST * 3
    edges = [0, *sorted(cuts), len(data)]
    arrivals = parse(*(data[a:b] for a, b in itertools.pairwise(edges)))
    assert arrivals == parse(POST) * 3


def test_a_chunked_body_with_trailers_is_joined():
    data = (
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\nX-Trailer: t\r\n\r\n"
    )
    (request,) = parse(data + POST)[:1]
    assert request.body == b"abcde"
    assert request.header(b"x-trailer") is None
    assert len(parse(data + POST)) == 2


@pytest.mark.parametrize(
    ("head", "is_keep_alive", "is_http_10"),
    [
        (b"GET / HTTP/1.1\r\nHost: h\r\n", True, False),
        (b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n", False, False),
        (b"GET / HTTP/1.0\r\n", False, True),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n", True, True),
    ],
)
def test_keep_alive_follows_version_and_header(head, is_keep_alive, is_http_10):
    (request,) = parse(head + b"\r\n")
    assert (request.is_keep_alive, request.is_http_10) == (is_keep_alive, is_http_10)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/health", b"/health"),
        (b"/health?a=/b", b"/health"),
        (b"http://h:1/v1/models?x", b"/v1/models"),
        (b"http://h", b"/"),
        (b"*", b"*"),
    ],
)
def test_the_path_is_taken_from_any_form_of_target(target, path):
    method = b"OPTIONS" if target == b"*" else b"GET"
    (request,) = parse(method + b" " + target + b" HTTP/1.1\r\nHost: h\r\n\r\n")
    assert request.path == path


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost h\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
def test_what_is_not_sound_http_is_refused(data):
    assert refused(data) == 400


def test_a_declared_body_over_the_limit_is_refused_before_it_comes():
    assert refused(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2049\r\n\r\n") == 413


def test_a_body_of_exactly_the_limit_is_taken():
    (request,) = parse(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2048\r\n\r\n", b"x" * 2048)
    assert len(request.body) == 2048


def test_a_chunked_body_over_the_limit_is_refused_when_it_passes_it():
    head = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert refused(head, b"800\r\n" + b"x" * 2048 + b"\r\n", b"1\r\nx\r\n") == 413


def test_many_headers_are_refused():
    assert refused(b"GET / HTTP/1.1\r\nHost: h\r\n", *[b"A: " + b"x" * 90 + b"\r\n"] * 12) == 431


def test_one_header_without_end_is_refused():
    assert refused(b"GET / HTTP/1.1\r\nHost: h\r\nA: ", *[b"x" * 200] * 8) == 431


def test_a_url_without_end_is_refused():
    assert refused(b"GET /", *[b"x" * 512] * 40) in (414, 431)


def test_a_long_read_that_ends_one_request_is_not_counted_as_the_head_of_the_next():
    body = b"x" * 2000
    data = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2000\r\n\r\n" + body + b"GET / HTTP/1.1\r\nHo"
    arrivals = parse(data, b"st: h\r\n\r\n")
    assert [type(arrival) for arrival in arrivals] == [Request, Request]


def test_a_compressed_body_is_refused():
    assert refused(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx") == 415


def encoded(coding):
    return parse(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: " + coding + b"\r\n\r\n1\r\nx\r\n0\r\n\r\n")


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip,chunked", b"identity, chunked"])
def test_another_transfer_encoding_than_chunked_is_refused(coding):
    assert encoded(coding) == [Refusal(501, "Of transfer encodings only chunked is supported.")]


def test_chunks_of_chunks_are_no_http():
    assert encoded(b"chunked, chunked") == [Refusal(400, "The request is not valid HTTP/1.1.")]


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b"CHUNKED", b"chunked "])
def test_chunked_may_be_spelled_in_any_case_with_blanks_around(coding):
    (request,) = encoded(coding)
    assert request.body == b"x"


def test_two_hosts_are_refused():
    assert refused(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n") == 400


def test_an_unknown_expectation_is_refused():
    assert refused(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: magic\r\nContent-Length: 1\r\n\r\n") == 417


def test_a_client_that_expects_to_continue_is_known_until_it_sends_its_body():
    parser = RequestParser(CONFIG)
    parser.feed(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert parser.wants_continue
    assert not parser.arrived
    parser.feed(b"a")
    assert not parser.wants_continue
    parser.feed(b"b")
    assert len(parser.arrived) == 1


@pytest.mark.parametrize("cut", [0, 5, 60, 130])
def test_an_offer_to_upgrade_is_passed_over_and_the_body_kept(cut):
    data = (
        b"POST /x HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABk\r\nContent-Length: 5\r\n\r\nhello"
    )
    first, second = parse(data[:cut], data[cut:] + POST)
    assert (first.method, first.path, first.body) == (b"POST", b"/x", b"hello")
    assert first.header(b"upgrade") is None
    assert second.body == b"hello"


def test_connect_is_refused():
    assert refused(b"CONNECT h:443 HTTP/1.1\r\nHost: h:443\r\n\r\nrest") == 405


def test_a_refusal_comes_after_the_requests_before_it_and_ends_parsing():
    arrivals = parse(POST + b"rubbish\r\n\r\n", POST)
    assert [type(arrival) for arrival in arrivals] == [Request, Refusal]


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_input_raises(data):
    parser = RequestParser(CONFIG)
    parser.feed(data)
    parser.feed(data)
