"""Pages of lists."""

import base64

import pytest

from relaxd.rpc.errors import InvalidArgument, Violations
from relaxd.rpc.message_parts import MAX_PAGE_BYTES, Page, newest_first
from relaxd.v1 import coordinator_pb2 as pb


def page_of(listed: str, sizes: dict[str, int], **request: object) -> Page[pb.TrainedSample]:
    """One page of samples whose texts have these sizes, by key."""
    page = Page[pb.TrainedSample](pb.ListSamplesRequest(**request), listed, default=3, maximum=5)
    for key in sorted(key for key in sizes if key > page.after):
        if not page.add(key, pb.TrainedSample(group_id=key, response="x" * sizes[key])):
            break
    return page


def names(page: Page[pb.TrainedSample]) -> str:
    return "".join(sample.group_id for sample in page.items)


def all_pages(sizes: dict[str, int], **request: object) -> list[str]:
    pages = [page_of("all", sizes, **request)]
    while pages[-1].next_page_token:
        pages.append(page_of("all", sizes, page_token=pages[-1].next_page_token, **request))
    return [names(page) for page in pages]


@pytest.mark.parametrize(("page_size", "pages"), [(0, ["abc", "def", "g"]), (1, list("abcdefg")), (5, ["abcde", "fg"])])
def test_pages_follow_each_other(page_size: int, pages: list[str]) -> None:
    assert all_pages(dict.fromkeys("abcdefg", 1), page_size=page_size) == pages


def test_a_page_ends_where_the_list_does() -> None:
    assert all_pages(dict.fromkeys("abc", 1)) == ["abc"]
    assert all_pages({}) == [""]


def test_pages_stay_small_and_something_large_has_a_page_of_its_own() -> None:
    half, whole = MAX_PAGE_BYTES // 2 - 100, 3 * MAX_PAGE_BYTES
    sizes = {"a": half, "b": half, "c": half, "d": whole, "e": 1, "f": 1}
    assert all_pages(sizes, page_size=5) == ["ab", "c", "d", "ef"]


def test_the_list_may_change_between_two_pages() -> None:
    first = page_of("all", dict.fromkeys("bcdef", 1))
    later = page_of("all", dict.fromkeys("aef", 1), page_token=first.next_page_token)  # d is gone, a is new
    assert (names(first), names(later)) == ("bcd", "ef")


@pytest.mark.parametrize("token", ["x", "é", "AAAA", base64.urlsafe_b64encode(b"all\n").decode(), "=" * 1000])
def test_a_damaged_token_is_named(token: str) -> None:
    with pytest.raises(InvalidArgument, match="page_token: must be") as caught:
        page_of("all", {}, page_token=token)
    assert [field for field, _ in caught.value.violations] == ["page_token"]


def test_a_token_belongs_to_its_list() -> None:
    token = page_of("samples of step 1", dict.fromkeys("abcd", 1)).next_page_token
    with pytest.raises(InvalidArgument):
        page_of("samples of step 2", dict.fromkeys("abcd", 1), page_token=token)


def test_a_page_has_at_most_as_many_items_as_the_list_allows() -> None:
    violations = Violations()
    request = pb.ListSamplesRequest(page_size=6, page_token="x")
    Page[pb.TrainedSample](request, "all", default=3, maximum=5, violations=violations)
    assert dict(violations.found)["page_size"] == "is 6: it must be 1 to 5; 0 means 3"
    assert set(dict(violations.found)) == {"page_size", "page_token"}
    with pytest.raises(InvalidArgument):
        page_of("all", {}, page_size=-1)


def test_the_newest_comes_first() -> None:
    times = {"old": 1.0, "newest": 1_800_000_000.25, "newer": 1_800_000_000.0}
    assert sorted(times, key=lambda name: newest_first(times[name], name)) == ["newest", "newer", "old"]
