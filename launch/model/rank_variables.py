"""The variables that make a rank that rank: its launcher sets them, and no other rank may get them."""

IDENTITY = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LMSRUN_EXPECT", "HOROVOD_HOSTNAME"}
    | {f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")}
    | {f"HOROVOD_GLOO_RENDEZVOUS_{name}" for name in ("ADDR", "PORT")}
)
"""Who a rank is, and where it meets the others."""
TRANSPORT = frozenset({"HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_GLOO_IFACE"})
"""By what it meets them: inherited from another job they would be wrong, but the user may know better."""
ENVIRONMENT = "--environment"
"""The shim's option for a file with the job's variables, where the launcher would write them into an argv."""
CONTROL_KEY = "LMSRUN_CONTROL_KEY"
"""What a rank says to its supervisor first, where the job's id stands on command lines for all to read."""
ATTEMPT = "LMSRUN_ATTEMPT"
"""How often the job has been started again."""
RESERVED = IDENTITY | {
    *("MASTER_ADDR", "MASTER_PORT"),
    *(f"LMSRUN_{name}" for name in ("JOB_ID", "RECEIPT_DIR", "RECEIPT_LINES", "RENDEZVOUS_PORT", "GPUS")),
    *("LMSRUN_CONTROL", "LMSRUN_TF_HOSTS", "LMSRUN_TF_PORT", ATTEMPT, CONTROL_KEY),
}
"""What ``-x`` may not change."""
