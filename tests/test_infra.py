"""infra/: the template is linted, deployed and its policies enforced on real requests; the jobs are valid.

moto's CloudFormation makes the roles, their policies and the bucket with its encryption. It ignores the rest of the
bucket's properties and the bucket policy: those are asserted, and judged, as moto resolved them from the template. What
needs Docker or a cluster is not run here.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import kubernetes_validate
import pytest
import typer
import yaml
from captures import ROLLOUT, answered, continued
from cfnlint.api import ManualArgs, lint_file
from moto import mock_aws
from moto.cloudformation.models import cloudformation_backends
from moto.cloudformation.parsing import clean_json
from moto.core import DEFAULT_ACCOUNT_ID
from policies import Judge, actions, enforced, statements

from s3capture import S3CaptureLedger, S3LineageResolver, S3TokenSink, S3TokenSource
from s3capture.cli import app, main
from s3capture.errors import StoreAccessError
from s3capture.keys import RunKeys
from s3capture.seaweed import find_weed
from s3capture.store import boto_client, boto_facts

ROOT = Path(__file__).resolve().parent.parent
INFRA = ROOT / "infra"
TEMPLATE = INFRA / "bucket.yaml"
BUCKET, PREFIX, REGION = "example-captures", "captures", "eu-central-1"
ROLES = {"ModelServer": "model-server", "Trainer": "trainer", "Auditor": "auditor", "Keeper": "keeper"}
ACCOUNT = f"arn:aws:iam::{DEFAULT_ACCOUNT_ID}:root"
KEY_ARN = f"arn:aws:kms:{REGION}:{DEFAULT_ACCOUNT_ID}:key/0a1b2c3d-0000-4000-8000-000000000000"
ISSUER = "oidc.eks.eu-central-1.amazonaws.com/id/0123456789ABCDEF"
pytestmark = pytest.mark.filterwarnings("ignore:Tried to parse AWS..S3..BucketPolicy")
EVERYTHING = {
    "KmsKeyArn": KEY_ARN,
    "Versioning": "Enabled",
    "PackStorageClass": "STANDARD_IA",
    "ExpireRun": "run-6",
    "TrainerPrincipals": "arn:aws:iam::123456789012:role/a,arn:aws:iam::123456789012:role/b",
    "OidcIssuer": ISSUER,
}


@dataclass(frozen=True)
class Deployed:
    """A stack as it stands: ``properties`` of the bucket resolved, the rest asked of S3 and IAM."""

    properties: dict[str, Any]
    encryption: dict[str, Any]
    policy: dict[str, Any]
    roles: dict[str, list[dict[str, Any]]]
    trust: dict[str, list[dict[str, Any]]]
    outputs: dict[str, str]

    def judge(self, role: str) -> Judge:
        return Judge(BUCKET, self.roles[role], self.policy)

    @property
    def rules(self) -> dict[str, dict[str, Any]]:
        """The lifecycle rules by id; moto leaves None where CloudFormation leaves nothing."""
        return {rule["Id"]: rule for rule in self.properties["LifecycleConfiguration"]["Rules"] if rule}


def _deploy(**parameters: str) -> Deployed:
    with mock_aws():
        session = boto3.session.Session("testing", "testing", region_name=REGION)
        stacks, s3, iam = session.client("cloudformation"), session.client("s3"), session.client("iam")
        stacks.create_stack(
            StackName="captures",
            TemplateBody=TEMPLATE.read_text(),
            Parameters=[
                {"ParameterKey": name, "ParameterValue": value}
                for name, value in {"BucketName": BUCKET, "Prefix": PREFIX, **parameters}.items()
            ],
            Capabilities=["CAPABILITY_IAM"],
        )
        (stack,) = stacks.describe_stacks(StackName="captures")["Stacks"]
        assert stack["StackStatus"] == "CREATE_COMPLETE"
        outputs = {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}
        roles, trust = {}, {}
        for output, role in ROLES.items():
            name = outputs[f"{output}RoleArn"].rpartition("/")[2]
            trust[role] = [*statements(_read(iam.get_role(RoleName=name)["Role"]["AssumeRolePolicyDocument"]))]
            roles[role] = [_read(document) for document in _documents(iam, name)]
        made = cloudformation_backends[DEFAULT_ACCOUNT_ID][REGION].get_stack("captures").resource_map
        return Deployed(
            _resolved(made, "Bucket"),
            s3.get_bucket_encryption(Bucket=BUCKET)["ServerSideEncryptionConfiguration"]["Rules"][0],
            _resolved(made, "BucketPolicy")["PolicyDocument"],
            roles,
            trust,
            outputs,
        )


def _resolved(made: Any, name: str) -> dict[str, Any]:
    """The properties of one resource with conditions, references and functions applied."""
    return dict(clean_json(made._resource_json_map[name]["Properties"], made))


def _read(document: Any) -> dict[str, Any]:
    """A policy document; moto gives some as JSON, some as Python prints it, and a string as JSON of the string."""
    while isinstance(document, str):
        document = ast.literal_eval(document) if document.startswith("{'") else json.loads(document)
    return dict(document)


def _documents(iam: Any, role: str) -> Iterator[Any]:
    for name in iam.list_role_policies(RoleName=role)["PolicyNames"]:
        yield iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
    for attached in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]:
        arn = attached["PolicyArn"]
        version = iam.get_policy(PolicyArn=arn)["Policy"]["DefaultVersionId"]
        yield iam.get_policy_version(PolicyArn=arn, VersionId=version)["PolicyVersion"]["Document"]


@pytest.fixture(scope="module")
def plain() -> Deployed:
    """The stack with nothing but a name."""
    return _deploy()


@pytest.fixture(scope="module")
def full() -> Deployed:
    """The stack with every option taken."""
    return _deploy(**EVERYTHING)


# The template


def test_the_template_lints() -> None:
    """cfn-lint finds nothing, not even something to remark."""
    assert not lint_file(TEMPLATE, ManualArgs(include_checks=["I"]))


def test_the_bucket_is_private_and_encrypted(plain: Deployed) -> None:
    """All public access is blocked, ACLs are off, and without a key the encryption is SSE-S3."""
    assert plain.encryption["ApplyServerSideEncryptionByDefault"] == {"SSEAlgorithm": "AES256"}
    blocked = plain.properties["PublicAccessBlockConfiguration"]
    assert len(blocked) == 4 and set(map(str, blocked.values())) <= {"True", "true"}
    assert plain.properties["OwnershipControls"]["Rules"] == [{"ObjectOwnership": "BucketOwnerEnforced"}]
    assert plain.outputs["Url"] == f"s3://{BUCKET}/{PREFIX}"


def test_a_key_means_kms_with_a_bucket_key(full: Deployed) -> None:
    """With a key ARN the bucket encrypts by it, and each role may use it for just what it does."""
    assert full.encryption["ApplyServerSideEncryptionByDefault"] == {
        "SSEAlgorithm": "aws:kms",
        "KMSMasterKeyID": KEY_ARN,
    }
    assert (
        str(full.properties["BucketEncryption"]["ServerSideEncryptionConfiguration"][0]["BucketKeyEnabled"]) == "True"
    )
    for role, documents in full.roles.items():
        kms = {action for action in actions(documents) if action.startswith("kms:")}
        assert kms == ({"kms:Decrypt"} if role == "auditor" else {"kms:Decrypt", "kms:GenerateDataKey"}), role
        assert all(
            one["Resource"] == KEY_ARN for d in documents for one in statements(d) if "kms:" in str(one["Action"])
        )


def test_the_bucket_outlives_its_stack() -> None:
    """Deleting the stack, or renaming the bucket, deletes neither the bucket nor its policy."""
    resources = yaml.load(TEMPLATE.read_text(), _CfnLoader)["Resources"]
    for name in ("Bucket", "BucketPolicy"):
        assert (resources[name]["DeletionPolicy"], resources[name]["UpdateReplacePolicy"]) == ("Retain", "Retain")


class _CfnLoader(yaml.SafeLoader):
    """Reads the template and leaves its functions unresolved."""


_CfnLoader.add_multi_constructor("!", lambda *_: None)


def test_lifecycle_without_options(plain: Deployed) -> None:
    """Upload leftovers go after a day and large objects move to a class that is read at once; nothing expires."""
    leftovers, packs = plain.rules["abort-multipart-leftovers"], plain.rules["packs-to-a-cold-class"]
    assert str(leftovers["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"]) == "1"
    assert packs["Prefix"] == f"{PREFIX}/" and int(packs["ObjectSizeGreaterThan"]) == 8 * 2**20
    (transition,) = packs["Transitions"]
    assert (transition["StorageClass"], int(transition["TransitionInDays"])) == ("GLACIER_IR", 30)
    assert len(plain.rules) == 2
    assert "VersioningConfiguration" not in plain.properties
    assert not any("Expir" in name for rule in plain.rules.values() for name in rule)


def test_lifecycle_with_options(full: Deployed) -> None:
    """Noncurrent versions expire where versioning is on; of the named run all but the archive does."""
    assert full.properties["VersioningConfiguration"] == {"Status": "Enabled"}
    versions = full.rules["expire-noncurrent-versions"]
    assert int(versions["NoncurrentVersionExpiration"]["NoncurrentDays"]) == 14
    expiring = {
        rule["Prefix"]: int(rule["ExpirationInDays"]) for rule in full.rules.values() if "ExpirationInDays" in rule
    }
    keys = RunKeys(PREFIX, "run-6")
    assert expiring == dict.fromkeys((keys.attempts, keys.lineage, f"{keys.root}ledger/"), 90)


# The policies


def test_who_may_take_a_role(plain: Deployed, full: Deployed) -> None:
    """Without names the account decides; with them only they, and the service account of the role's name."""
    for role in ROLES.values():
        (only,) = plain.trust[role]
        assert (only["Action"], only["Principal"]) == ("sts:AssumeRole", {"AWS": ACCOUNT})
        named, web = full.trust[role]
        expected = EVERYTHING["TrainerPrincipals"].split(",") if role == "trainer" else [ACCOUNT]
        assert (named["Action"], named["Principal"]) == ("sts:AssumeRole", {"AWS": expected})
        assert web["Action"] == "sts:AssumeRoleWithWebIdentity"
        assert web["Principal"]["Federated"] == f"arn:aws:iam::{DEFAULT_ACCOUNT_ID}:oidc-provider/{ISSUER}"
        assert web["Condition"]["StringEquals"] == {
            f"{ISSUER}:aud": "sts.amazonaws.com",
            f"{ISSUER}:sub": f"system:serviceaccount:s3capture:s3capture-{role}",
        }


RECORD = f"{PREFIX}/run-7/attempts/dc/7-3-a1/call/c1"
CREATING = {"s3__if_none_match": "*"}


@pytest.mark.parametrize("role", ROLES.values())
def test_nobody_replaces_an_object(plain: Deployed, role: str) -> None:
    """A PUT without If-None-Match is denied to every role; with it, to the auditor alone."""
    judge = plain.judge(role)
    assert not judge.allows("s3:PutObject", RECORD)
    assert judge.allows("s3:PutObject", RECORD, **CREATING) is (role != "auditor")


def test_not_even_an_administrator_replaces_an_object(plain: Deployed) -> None:
    """The bucket policy binds whoever has every permission; deleting and reading are not its business."""
    everything = {"Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    administrator = Judge(BUCKET, [everything], plain.policy)
    assert not administrator.allows("s3:PutObject", RECORD)
    assert administrator.allows("s3:PutObject", RECORD, **CREATING)
    assert administrator.allows("s3:DeleteObject", RECORD)


@pytest.mark.parametrize("role", ROLES.values())
def test_nothing_goes_without_tls(plain: Deployed, role: str) -> None:
    """Plain HTTP and old TLS are denied whatever the request."""
    judge = plain.judge(role)
    assert judge.allows("s3:GetObject", RECORD)
    assert not judge.allows("s3:GetObject", RECORD, aws__SecureTransport="false")
    assert not judge.allows("s3:GetObject", RECORD, s3__TlsVersion="1.1")


DELETERS = {"trainer", "keeper"}


@pytest.mark.parametrize("role", ROLES.values())
@pytest.mark.parametrize(
    "key",
    [
        RECORD,
        f"{PREFIX}/run-7/attempts/dc/probe/call/c1",
        f"{PREFIX}/run-7/lineage/dc/probe/fingerprint/c1",
        f"{PREFIX}/run-7/ledger/dc/probe/intent/c1",
        f"{PREFIX}/run-7/archive/deleted/dc/probe/digest",
    ],
)
def test_who_deletes_captures(plain: Deployed, role: str, key: str) -> None:
    """Trainer and keeper delete; the model server does not, not even what belongs to a rollout called "probe"."""
    assert plain.judge(role).allows("s3:DeleteObject", key) is (role in DELETERS)


@pytest.mark.parametrize("role", ROLES.values())
def test_no_role_reaches_beyond_its_prefix(plain: Deployed, role: str) -> None:
    """Objects beside the prefix are neither read, created nor deleted, and nothing of the bucket is changed."""
    judge, other = plain.judge(role), f"{PREFIX}-of-others/run-7/attempts/dc/7-3-a1/call/c1"
    assert not judge.allows("s3:GetObject", other)
    assert not judge.allows("s3:PutObject", other, **CREATING)
    assert not judge.allows("s3:DeleteObject", other)
    for action in ("s3:PutBucketPolicy", "s3:DeleteBucket", "s3:PutLifecycleConfiguration", "s3:DeleteObjectVersion"):
        assert not judge.allows(action) and not judge.allows(action, RECORD)


# The roles, on the requests that the code really sends


class Place:
    """A bucket on SeaweedFS whose clients are held to the policies of one role at a time."""

    def __init__(self, bucket: str, endpoint_url: str, spill: Path, patch: pytest.MonkeyPatch) -> None:
        self.url, self.endpoint_url = f"s3://{bucket}/{PREFIX}", endpoint_url
        self._spill, self._patch = spill, patch
        self._make = boto_client.make_client

    def act_as(self, judge: Judge) -> dict[str, Any]:
        """Hold every client made from now on to ``judge``; return settings of endpoints of a process of its own."""
        for module in (boto_client, boto_facts):
            self._patch.setattr(module, "make_client", enforced(self._make, judge))
        spill = self._spill / str(len([*self._spill.iterdir()]))
        spill.mkdir(mode=0o700)
        return {
            "url": self.url,
            "run": "run-7",
            "endpoint_url": self.endpoint_url,
            "region": "us-east-1",
            "spill_dir": str(spill),
        }

    def command(self, *arguments: str) -> None:
        assert main([*arguments, "--endpoint-url", self.endpoint_url]) in (0, 1)


@pytest.fixture
def place(bucket: str, seaweed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    (tmp_path / "spill").mkdir(mode=0o700)
    return Place(bucket, seaweed.endpoint_url, tmp_path / "spill", monkeypatch)


def _capture(settings: dict[str, Any], *rollouts: str) -> None:
    """What a model server does with a rollout."""
    sink, resolver, ledger = S3TokenSink(**settings), S3LineageResolver(**settings), S3CaptureLedger(**settings)

    async def run() -> None:
        for rollout in rollouts:
            await ledger.begin_call(rollout, "c1")
            await sink.begin_call(rollout, "c1")
            await sink.put(answered("c1", rollout=rollout))
            await resolver.resolve(rollout, continued())
            await sink.begin_call(rollout, "c2")
            await sink.record_engine_refusal(rollout, model_call_id="c2", code="too_long")
            await sink.mark_incomplete(rollout, "c3")

    asyncio.run(run())


def _consume(settings: dict[str, Any], how: str) -> None:
    """What a trainer does with it."""
    source = S3TokenSource(**settings)

    async def run() -> None:
        if how == "delete":
            await source.delete([ROLLOUT])
            return
        snapshot = await source.freeze(ROLLOUT)
        if how == "drop":
            assert await source.drop(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        elif how == "retire":
            await source.retire([ROLLOUT])

    asyncio.run(run())


def _doctor(place: Place) -> None:
    client = boto3.session.Session().client("s3", endpoint_url=place.endpoint_url, region_name="us-east-1")
    # Only of a versioned bucket it asks for Object Lock as well.
    client.put_bucket_versioning(Bucket=place.url.split("/")[2], VersioningConfiguration={"Status": "Enabled"})
    place.command("doctor", place.url, "--rounds", "1", "--writers", "2")


Act = Callable[[Place, dict[str, Any]], None]
OF_RUN = ("--run", "run-7")
SECOND = "7-4"
# In an order in which one leaves to the next what it needs.
DOES: dict[str, dict[str, Act]] = {
    "model-server": {
        "capture": lambda _, settings: _capture(settings, "another"),
        "doctor": lambda place, _: _doctor(place),
    },
    "trainer": {
        "drop": lambda _, settings: _consume(settings, "drop"),
        "delete": lambda _, settings: _consume(settings, "delete"),
        "retire": lambda _, settings: _consume(settings, "retire"),
    },
    "auditor": {
        "ls": lambda place, _: place.command("ls", place.url, *OF_RUN),
        "show": lambda place, _: place.command("show", place.url, ROLLOUT, *OF_RUN),
        "audit": lambda place, _: place.command("audit", place.url, *OF_RUN),
        "replay": lambda place, settings: place.command(
            "replay", place.url, *OF_RUN, "--all", "--to", f"{settings['spill_dir']}/out.jsonl"
        ),
    },
    "keeper": {
        "archive": lambda place, _: place.command("archive", place.url, *OF_RUN, "--state", "frozen", "--yes"),
        "retire": lambda place, _: place.command("retire", place.url, *OF_RUN, "--rollout", SECOND, "--yes"),
        "sweep": lambda place, _: place.command("sweep", place.url, *OF_RUN, "--older-than", "2100-01-01", "--yes"),
        "delete": lambda place, _: place.command("delete", place.url, *OF_RUN, "--all", "--yes"),
    },
}


# What the bucket is like may be asked by every role; doctor asks it all, and others some.
ABOUT = {"s3:GetBucketVersioning", "s3:GetBucketObjectLockConfiguration"}


@pytest.mark.parametrize("role", ROLES.values())
def test_a_role_may_do_what_it_is_for_and_no_more(plain: Deployed, place: Place, role: str) -> None:
    """Every request that the commands and endpoints of a role send is allowed, and what is allowed is sent by one."""
    _capture(place.act_as(plain.judge("model-server")), ROLLOUT, SECOND)
    _consume(place.act_as(plain.judge("trainer")), "freeze")
    judge = plain.judge(role)
    settings = place.act_as(judge)
    for act, do in DOES[role].items():
        do(place, settings)
        assert not judge.denied, act
    assert actions(plain.roles[role]) - judge.asked <= ABOUT


def test_a_model_server_cannot_harm_what_is_there(plain: Deployed, place: Place) -> None:
    """In its role nothing is deleted and nothing replaced, by whatever request it tries."""
    settings = place.act_as(plain.judge("model-server"))
    _capture(settings, ROLLOUT)
    judge = plain.judge("model-server")
    with pytest.raises(StoreAccessError):
        _consume(place.act_as(judge), "delete")
    assert {action for action, _ in judge.denied} == {"s3:DeleteObject"}
    client = judge.enforce(
        boto3.session.Session().client("s3", endpoint_url=place.endpoint_url, region_name="us-east-1")
    )
    bucket = place.url.split("/")[2]
    keys = [row["Key"] for row in client.list_objects_v2(Bucket=bucket)["Contents"]]
    assert [key for key in keys if "/call/" in key]
    for key in keys:
        with pytest.raises(client.exceptions.ClientError, match="AccessDenied"):
            client.put_object(Bucket=bucket, Key=key, Body=b"forged")
        with pytest.raises(client.exceptions.ClientError, match="PreconditionFailed"):
            client.put_object(Bucket=bucket, Key=key, Body=b"forged", IfNoneMatch="*")
        with pytest.raises(client.exceptions.ClientError, match="AccessDenied"):
            client.delete_object(Bucket=bucket, Key=key)


# The jobs


def _documents_of(name: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((INFRA / name).read_text())]


def _cronjobs() -> list[dict[str, Any]]:
    return [document for document in _documents_of("cronjob.yaml") if document["kind"] == "CronJob"]


def _command_lines() -> Iterator[tuple[str, list[str]]]:
    for name, service in _documents_of("compose.yaml")[0]["services"].items():
        if "entrypoint" not in service:
            yield f"compose.yaml: {name}", [_interpolated(word) for word in service["command"]]
    for job in _cronjobs():
        (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
        names = {variable["name"] for variable in container["env"]}
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert used <= names, "Kubernetes leaves a variable that it does not know as it is"
        yield f"cronjob.yaml: {container['name']}", [re.sub(r"\$\(\w+\)", "s3://b/p", w) for w in container["args"]]
    for path in sorted(INFRA.iterdir()):
        for line in re.findall(r"(?:^|[ #$])s3capture ((?:[a-z-]+ )+s3://.*)$", path.read_text(), re.MULTILINE):
            yield f"{path.name}: {line}", shlex.split(line, comments=True)
    for line in re.findall(
        r"compose.yaml run --rm \w+ (\w+ s3://.*)$", (INFRA / "compose.yaml").read_text(), re.MULTILINE
    ):
        yield f"compose.yaml: {line}", shlex.split(line, comments=True)


def _interpolated(word: str) -> str:
    return re.sub(r"\$\{\w+(?::-([^}]*))?[^}]*\}", lambda found: found[1] or "given", word)


def test_compose_is_valid() -> None:
    """The compose file fits the schema of the compose specification."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--builtin-schema",
            "vendor.compose-spec",
            str(INFRA / "compose.yaml"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_compose_serves_loopback_only_and_knows_its_server() -> None:
    """The server's port is published on loopback alone, and every flag is one that the program has."""
    store = _documents_of("compose.yaml")[0]["services"]["store"]
    assert all(port.startswith("127.0.0.1:") for port in store["ports"])
    known = subprocess.run([find_weed(), "mini", "-h"], capture_output=True, text=True, check=False)
    flags = set(re.findall(r"^\s+-([\w.]+)", known.stdout + known.stderr, re.MULTILINE))
    used = {word.removeprefix("-").partition("=")[0] for word in store["command"] if word.startswith("-")}
    assert used and used <= flags


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_the_cronjobs_are_valid(version: str) -> None:
    """Every document fits the strict schema of an older and of the newest Kubernetes that the validator knows."""
    for document in _documents_of("cronjob.yaml"):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_cronjobs_are_careful() -> None:
    """No job runs twice at once, as root, on a writable disk, without bounds, or again after findings."""
    accounts = {one["metadata"]["name"] for one in _documents_of("cronjob.yaml") if one["kind"] == "ServiceAccount"}
    assert [job["metadata"]["name"] for job in _cronjobs()] == [
        "s3capture-audit",
        "s3capture-archive",
        "s3capture-sweep",
    ]
    for job in _cronjobs():
        spec = job["spec"]["jobTemplate"]["spec"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert job["spec"]["concurrencyPolicy"] == "Forbid"
        assert spec["backoffLimit"] <= 2 and spec["activeDeadlineSeconds"]
        assert pod["restartPolicy"] == "Never", "a pod failure policy needs it"
        (rule,) = spec["podFailurePolicy"]["rules"]
        assert rule["action"] == "FailJob"
        assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [1]}
        assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["resources"]["limits"]["memory"] == "512Mi"
        assert pod["volumes"][0]["emptyDir"] and container["volumeMounts"][0]["mountPath"] == "/tmp"
        role = "auditor" if container["name"] == "audit" else "keeper"
        assert pod["serviceAccountName"] == f"s3capture-{role}" in accounts
        assert ("--yes" in container["args"]) is (role == "keeper")


@pytest.mark.parametrize(("where", "line"), [pytest.param(*found, id=found[0]) for found in _command_lines()])
def test_every_command_line_parses(where: str, line: list[str]) -> None:
    """Each s3capture command of infra/ exists and takes the options that it is given."""
    command: Any = typer.main.get_command(app)
    words = line
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"{where}: there is no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context(where, [*words])


def test_the_image_installs_extras_that_exist() -> None:
    """What the Dockerfile copies is there, and the extras that it and compose ask for are those of the project."""
    text = (INFRA / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split())
    asked = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    asked.append(_documents_of("compose.yaml")[0]["services"]["store"]["build"]["args"]["EXTRAS"])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra for one in asked for extra in one.split(",")} <= extras.keys()
