"""One trace from prompt to optimizer step, collected from five real services by a real OTLP receiver."""

from collections import defaultdict

import pytest

from tests.e2e.conftest import Workplace
from tests.otlp import ReceivedSpan, otlp_receiver

SERVICE_OF = {
    "publish": "relaxd-coordinator",
    "generate": "relaxd-rollout",
    "score": "relaxd-reward",
    "advantage": "relaxd-advantage",
    "train": "relaxd-trainer",
}


@pytest.mark.timeout(240)
def test_a_group_is_one_trace_from_prompt_to_step(workplace: Workplace) -> None:
    with otlp_receiver() as receiver:
        code, output = workplace.relaxd("run", "tiny.toml", "--run-id", "traced", timeout=200, **receiver.environment())
        assert code == 0, output
        spans = receiver.spans()
        metrics = {point.name for point in receiver.points()}

    traces: dict[str, dict[str, ReceivedSpan]] = defaultdict(dict)
    for span in spans:
        if span.name in SERVICE_OF:
            assert span.service == SERVICE_OF[span.name]
            traces[span.trace_id][span.name] = span
    trained = [trace for trace in traces.values() if "train" in trace]
    assert len(trained) == 6  # 3 steps of 2 groups
    steps = {(span.trace_id, span.span_id): span for span in spans if span.name == "step"}
    for trace in trained:
        assert trace.keys() == SERVICE_OF.keys()
        root = trace["publish"]
        assert root.parent_id == ""
        assert all(span.parent_id == root.span_id for name, span in trace.items() if name != "publish")
        order = [trace[name].start for name in SERVICE_OF]
        assert order == sorted(order)
        assert {span.attributes["relaxd.group_id"] for span in trace.values()} == {root.attributes["relaxd.group_id"]}
        assert len(trace["train"].links) == 1
        assert trace["train"].links[0] in steps
    assert {step.service for step in steps.values()} == {"relaxd-trainer"}
    assert [span for span in spans if span.name == "sync_weights"]
    # A sample of docs/metrics.md, from each service that has some.
    assert {"relaxd.reward", "relaxd.staleness", "relaxd.queue.waiting", "relaxd.sync.seconds"} <= metrics
