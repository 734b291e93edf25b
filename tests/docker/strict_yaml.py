"""Strict readers of the YAML templates: a key that a format does not have is an error, so is another type.

Only what the templates use is listed, so that a new key makes somebody look it up. Sources: the MPI
Operator's ``MPIJobSpec`` and its CRD ``kubeflow.org_mpijobs.yaml`` (v2beta1), Kubernetes' core/v1 PodSpec,
and the Compose specification.
"""

from collections.abc import Callable
from typing import Any

import yaml

Check = Callable[[object, str], None]


class SchemaError(AssertionError):
    """What was found where, and what would be right."""


def is_a(*kinds: type, least: int | None = None) -> Check:
    """A value of exactly one of these types (``True`` is no number), at least ``least``."""

    def check(value: Any, where: str) -> None:
        if type(value) not in kinds:
            raise SchemaError(f"{where} is {value!r}; needed {' or '.join(kind.__name__ for kind in kinds)}")
        if least is not None and value < least:
            raise SchemaError(f"{where} is {value}; needed at least {least}")

    return check


def one_of(*words: str) -> Check:
    """One of these words."""

    def check(value: object, where: str) -> None:
        if value not in words:
            raise SchemaError(f"{where} is {value!r}; needed one of {', '.join(words)}")

    return check


def list_of(item: Check) -> Check:
    """A list."""

    def check(value: object, where: str) -> None:
        is_a(list)(value, where)
        for index, each in enumerate(value if isinstance(value, list) else ()):
            item(each, f"{where}[{index}]")

    return check


def map_of(item: Check) -> Check:
    """A mapping with keys of the user's."""

    def check(value: object, where: str) -> None:
        is_a(dict)(value, where)
        for key, each in (value if isinstance(value, dict) else {}).items():
            is_a(str)(key, where)
            item(each, f"{where}.{key}")

    return check


def fields(*, needs: tuple[str, ...] = (), **known: Check) -> Check:
    """A mapping with these keys alone; ``needs`` names those that it must have."""

    def check(value: object, where: str) -> None:
        is_a(dict)(value, where)
        found = value if isinstance(value, dict) else {}
        if unknown := found.keys() - known.keys():
            raise SchemaError(
                f"{where} has {', '.join(map(repr, sorted(unknown)))}; known: {', '.join(known)}"
            )
        if missing := [name for name in needs if name not in found]:
            raise SchemaError(f"{where} lacks {', '.join(missing)}")
        for key, each in found.items():
            known[key](each, f"{where}.{key}")

    return check


TEXT = is_a(str)
NUMBER = is_a(int, least=0)
_POD = fields(
    needs=("containers",),
    enableServiceLinks=is_a(bool),
    containers=list_of(
        fields(
            needs=("name", "image"),
            name=TEXT,
            image=TEXT,
            args=list_of(TEXT),
            env=list_of(fields(needs=("name", "value"), name=TEXT, value=TEXT)),
            readinessProbe=fields(tcpSocket=fields(needs=("port",), port=NUMBER)),
            securityContext=fields(
                runAsUser=is_a(int, least=1),
                runAsNonRoot=is_a(bool),
                allowPrivilegeEscalation=is_a(bool),
                capabilities=fields(add=list_of(one_of("SYS_NICE", "IPC_LOCK"))),
            ),
            resources=fields(limits=map_of(is_a(int, str))),
            volumeMounts=list_of(fields(needs=("name", "mountPath"), name=TEXT, mountPath=TEXT)),
        )
    ),
    volumes=list_of(
        fields(
            needs=("name",),
            name=TEXT,
            persistentVolumeClaim=fields(needs=("claimName",), claimName=TEXT),
            emptyDir=fields(medium=one_of("", "Memory"), sizeLimit=TEXT),
        )
    ),
)
_REPLICAS = fields(
    needs=("template",),
    replicas=NUMBER,
    restartPolicy=one_of("Always", "OnFailure", "Never", "ExitCode"),
    # The operator overrides a restartPolicy inside the template and warns of it, so that none is known here.
    template=fields(needs=("spec",), spec=_POD),
)
MPI_JOB = fields(
    needs=("apiVersion", "kind", "metadata", "spec"),
    apiVersion=one_of("kubeflow.org/v2beta1"),
    kind=one_of("MPIJob"),
    metadata=fields(needs=("name",), name=TEXT),
    spec=fields(
        needs=("mpiReplicaSpecs",),
        slotsPerWorker=is_a(int, least=1),
        sshAuthMountPath=TEXT,
        launcherCreationPolicy=one_of("AtStartup", "WaitForWorkersReady"),
        runPolicy=fields(cleanPodPolicy=one_of("None", "Running", "All")),
        mpiReplicaSpecs=fields(needs=("Launcher",), Launcher=_REPLICAS, Worker=_REPLICAS),
    ),
)
_DEPENDENCY = fields(
    needs=("condition",),
    condition=one_of("service_started", "service_healthy", "service_completed_successfully"),
)
COMPOSE = fields(
    needs=("services",),
    services=map_of(
        fields(
            needs=("image",),
            image=TEXT,
            command=list_of(TEXT),
            depends_on=map_of(_DEPENDENCY),
            cap_add=list_of(one_of("SYS_NICE")),
            volumes=list_of(TEXT),
        )
    ),
    volumes=map_of(fields()),
)


class _Loader(yaml.SafeLoader):
    """A key twice in one mapping is an error; plain YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise SchemaError(f"a key twice among {', '.join(map(str, keys))}, {node.start_mark}")
        return super().construct_mapping(node, deep)


def read(text: str, schema: Check) -> dict[str, Any]:
    """The one document of ``text``, held against ``schema``."""
    document = yaml.load(text, _Loader)  # noqa: S506 - derived from SafeLoader
    schema(document, "document")
    assert isinstance(document, dict)
    return document
