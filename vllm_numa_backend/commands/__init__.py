"""The subcommands of numa-swizzle, one file each. They import vLLM and torch only when they run."""


class UserError(Exception):
    """Something the user can put right: shown as one sentence, without a traceback, with exit code 2."""
