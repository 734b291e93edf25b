"""Horovod's basics as far as the bootstrap touches them."""

import os


class HorovodBasics:
    def init(self, comm: "list[int] | None" = None) -> None:
        if os.environ.get("FAKE_INIT_FAILS"):
            raise ValueError("Horovod initialization failed.")

    def rank(self) -> int:
        return int(os.environ["HOROVOD_RANK"])

    def size(self) -> int:
        return int(os.environ["HOROVOD_SIZE"])

    def local_rank(self) -> int:
        return int(os.environ["HOROVOD_LOCAL_RANK"])

    def local_size(self) -> int:
        return int(os.environ["HOROVOD_LOCAL_SIZE"])
