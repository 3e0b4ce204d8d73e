"""Writes the reference pages that follow from the code: `python docs/generate.py`. A test compares them with it."""

from pathlib import Path

from config_fields import FieldDescription, MessageDescription, descriptions

from halimede.commands.flag import Flag, FlagTreatment
from halimede.commands.flags import GROUPS
from halimede.core.config.support import Treatment
from halimede.core.observe import metrics

PAGES = Path(__file__).parent / "pages"

FLAGS_HEAD = """\
# Flags

`halimede serve` and `tritonserver` take the same flags, under Triton's names. A value is written `--flag=value` or
`--flag value`; booleans are `true`, `on`, `1`, `false`, `off` or `0`. A mistake ends the command with code 2 and a text
that names the flag.

Flags without effect are accepted, and one warning each says why they have no effect. Among them are those whose
feature is not supported yet: the server serves without it. The value that leaves the feature off, shown as the default,
gives no warning.
"""

CONFIGURATION_HEAD = """\
# Model configuration

A model's `config.pbtxt` is Triton's, in protobuf's text format. `config.yaml` has the same fields under the same names,
with lists as lists and maps as maps; a model has one of the two. Fields that are not set are taken from the model
file, or get a default: `halimede explain-config MODEL_DIR` shows all fields, and where each value comes from.

All errors are reported together, with line and column. Fields without effect are accepted, because every answer is
the same without them, and one warning per load names them. Fields that are not supported yet and can change an answer
make the load fail.
"""


METRICS_HEAD = """\
# Metrics

`GET /metrics` on port 8002 (`--metrics-address`, `--metrics-port`) answers in Prometheus' text format;
`--allow-metrics=false` turns it off. This page lists every metric that the server publishes. The
metrics that [python models](python-models.md) declare with `MetricFamily` follow after them.

The series of a model also have its `metric_tags` as labels, with an underscore before each name. They start at 0 with
each load of the model and disappear when it is unloaded. A metric without series still has its `# HELP` and `# TYPE`
lines, except for the histogram of first responses. [What to scale on](scaling-metrics.md) compares those that
autoscalers use.
"""

METRICS_TAIL = """\
## Triton's metrics

Names that begin with `nv_` are Triton's, with its types, help texts, labels and units, so that dashboards need no
change. What differs:

- Durations of a request end with its last answer. In Triton, the durations of decoupled models, and of models that use
  `get_response_sender()`, end when `execute` returns, even if the requests are not answered yet.
- `nv_inference_first_response_histogram_ms` is published unless `--metrics-config histogram_latencies=false` says
  otherwise, and has more buckets. `model_metrics` does not change them yet.
- `--metrics-config counter_latencies=false` leaves out the five `nv_inference_*_duration_us` and nothing else.
- `halimede_queue_duration_seconds` has failed requests too, unlike `nv_inference_queue_duration_us`; the series with
  `outcome="success"` have the same requests. Until the first request with an outcome, its histogram has the bucket
  `+Inf` alone.
- A request that the model answers with an error counts as failed; Triton counts it as a success.

Of Triton's metrics these are absent:

- `nv_inference_*_summary_us`: there are no summaries. `halimede_request_duration_seconds` and
  `halimede_queue_duration_seconds` are histograms, from which `histogram_quantile` computes any quantile.
- `nv_cache_*`: the server has no response cache yet.
- `nv_pinned_memory_pool_*`: the server has no pinned memory pool.

## Queries

Mean time in the queue of successful requests in microseconds, of all queued requests in seconds, and the 99th
percentile of the duration of requests over all replicas in seconds:

```text
rate(nv_inference_queue_duration_us[1m]) / rate(nv_inference_request_success[1m])
sum by (model) (rate(halimede_queue_duration_seconds_sum{outcome!="rejected"}[1m]))
  / sum by (model) (rate(halimede_queue_duration_seconds_count{outcome!="rejected"}[1m]))
histogram_quantile(0.99, sum by (le, model) (rate(halimede_request_duration_seconds_bucket[5m])))
```

The chart has [alerts and dashboards](alerts.md) with further ones.
"""


def flags_page() -> str:
    """All flags, by group and treatment."""
    lines = [FLAGS_HEAD]
    for group, flags in GROUPS.items():
        lines += [f"## {group}", "", "| flag | default | meaning |", "|---|---|---|"]
        lines += [_flag_row(flag) for flag in flags]
        lines.append("")
    return "\n".join(lines)


def _flag_row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    value = f" `{_cell(flag.metavar)}`" if flag.metavar else ""
    meaning = _cell(flag.help)
    if flag.treatment is FlagTreatment.NO_EFFECT:
        meaning += f" *No effect: {_cell(flag.why)}.*"
    if flag.repeatable:
        meaning += " Repeatable."
    return f"| {names}{value} | {f'`{flag.default}`' if flag.default else ''} | {meaning} |"


def configuration_page() -> str:
    """All messages and fields of the configuration, `ModelConfig` first."""
    lines = [CONFIGURATION_HEAD]
    for message in descriptions():
        lines += [*_message_lines(message), ""]
    return "\n".join(lines)


def _message_lines(message: MessageDescription) -> list[str]:
    head = [f"## {message.name}", ""]
    if not message.fields:
        return [*head, "Has no fields."]
    return [*head, "| field | type | default | meaning |", "|---|---|---|---|", *map(_field_row, message.fields)]


def _field_row(field: FieldDescription) -> str:
    kind = _cell(field.type)
    if field.message:
        kind = kind.replace(field.message, f"[{field.message}](#{field.message.lower()})")
    meaning = _cell(field.meaning)
    if field.values:
        meaning += " One of " + ", ".join(f"`{value}`" for value in field.values) + "."
    if field.oneof:
        meaning += " At most one of " + ", ".join(f"`{name}`" for name in field.oneof) + "."
    if field.honoured_by:
        other = "no effect" if field.treatment is Treatment.NO_EFFECT else "refused"
        meaning += f" *For the backend `{'`, `'.join(field.honoured_by)}`; {other} for others.*"
    elif field.treatment is Treatment.NO_EFFECT:
        meaning += f" *No effect: {_cell(field.why)}.*"
    elif field.treatment is Treatment.NOT_YET:
        meaning += f" *Not supported yet{_cell(field.why)}.*"
    return f"| `{field.name}` | {kind} | {f'`{field.default}`' if field.default else ''} | {meaning} |"


def metrics_page() -> str:
    """All families of metrics, by what they are about."""
    lines = [METRICS_HEAD]
    for group in metrics.GROUPS:
        labels = ", ".join(f"`{label}`" for label in group.labels)
        about = " ".join(filter(None, (group.about, f"Labels: {labels}." if labels else "No labels.")))
        lines += [f"## {group.title}", "", about, "", "| name | type | unit | when it counts |", "|---|---|---|---|"]
        lines += [f"| `{each.name}` | {each.kind} | {each.unit} | {_cell(each.counts)} |" for each in group.families]
        lines.append("")
    return "\n".join([*lines, METRICS_TAIL])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


GENERATED = {"flags.md": flags_page, "configuration.md": configuration_page, "metrics.md": metrics_page}

if __name__ == "__main__":
    for name, page in GENERATED.items():
        (PAGES / name).write_text(page())
