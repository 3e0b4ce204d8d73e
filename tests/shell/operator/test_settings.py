import pytest

from halimede_operator.core.platform import Platform
from halimede_operator.settings import Settings, parse


def test_missing_flags_have_their_defaults(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert parse(["--server-image", "server:1"]) == Settings(
        platform=Platform(server_image="server:1", gpu_server_image="server:1", operator_namespace="default"),
        lease_namespace="default",
        lease_name="halimede-operator",
        health_port=8080,
        metrics_port=9090,
        log_format="json",
        kubeconfig=None,
    )


def test_every_flag_can_be_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HALIMEDE_SERVER_IMAGE", "server:1")
    monkeypatch.setenv("HALIMEDE_WATCH_NAMESPACE", "prod test")
    line = """--gpu-server-image gpu:1 --image-pull-policy Never --gpu-image-pull-policy Always --image-pull-secret a --image-pull-secret b --scheme s3
        --file-root /models --cache-host-path /cache --s3-endpoint http://store:9000 --s3-region here --s3-secret keys --max-replicas 7 --prometheus-address http://prom:9090 --operator-namespace own
        --node-lost-toleration-seconds 30 --lease-namespace leases --lease-name name --health-port 1 --metrics-port 2 --log-format text --kubeconfig file
        --metrics-collector {"namespaceSelector":{"matchLabels":{"team":"x"}}} --metrics-collector {"podSelector":{}}"""
    assert parse(line.split()) == Settings(
        platform=Platform(
            server_image="server:1",
            gpu_server_image="gpu:1",
            image_pull_policy="Never",
            gpu_image_pull_policy="Always",
            image_pull_secrets=("a", "b"),
            schemes=frozenset({"s3", "file"}),
            file_roots=("/models",),
            cache_host_path="/cache",
            s3_endpoint="http://store:9000",
            s3_region="here",
            s3_secret="keys",
            node_lost_toleration_seconds=30,
            operator_namespace="own",
            metrics_collectors=({"namespaceSelector": {"matchLabels": {"team": "x"}}}, {"podSelector": {}}),
            watch_namespaces=("prod", "test"),
            prometheus_address="http://prom:9090",
            max_replicas=7,
        ),
        lease_namespace="leases",
        lease_name="name",
        health_port=1,
        metrics_port=2,
        log_format="text",
        kubeconfig="file",
    )


@pytest.mark.parametrize(
    ("line", "status"),
    [("", 2), ("--server-image x --health-port 70000", 2), ("--server-image x --nothing", 2), ("--help", 0)],
)
def test_invalid_flags_are_reported(line: str, status: int, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_info:
        parse(line.split())
    assert exit_info.value.code == status
    out = capsys.readouterr()
    assert "Usage" in out.out + out.err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "peer must have either ipBlock or selectors"),
        ('{"podSelector":[]}', "peer.podSelector must be an object, got a list"),
        ('{"ipBlock":{"cidr":"10.0.0.0"}}', "peer.ipBlock.cidr must be a block of addresses such as 10.0.0.0/8"),
    ],
)
def test_invalid_collectors_are_refused(text: str, problem: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_info:
        parse(["--server-image", "x", "--metrics-collector", text])
    assert exit_info.value.code == 2
    assert problem in " ".join(capsys.readouterr().err.split())
