"""Options as getopt_long reads them, from a table.

Long options may be abbreviated; short ones may be bundled and may carry their value.  The words
of the errors are those that Slurm's users see.
"""

from __future__ import annotations

from clusterctl.slurm.errors import CommandError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Whether an option takes a value.
NO, REQUIRED, OPTIONAL = 0, 1, 2


class Opt:
    """One option of a command.

    ``help`` is its line in ``--help``; ``kind`` says what becomes of it: "" is built, "inert"
    is accepted with a warning that it has no effect here, anything else is the reason why it is
    refused.
    """

    __slots__ = ("arg", "help", "kind", "long", "metavar", "short")

    def __init__(
        self,
        long: str,
        short: str = "",
        arg: int = NO,
        metavar: str = "",
        help: str = "",  # noqa: A002 - the field's usual name
        kind: str = "",
    ) -> None:
        self.long = long
        self.short = short
        self.arg = arg
        self.metavar = metavar
        self.help = help
        self.kind = kind


INERT = "inert"
UNSUPPORTED = "is not supported by clusterctl"


class Parser:
    """The options of one command; ``usage_exit`` is its exit code for a wrong option."""

    def __init__(
        self, command: str, table: Sequence[Opt], *, usage_exit: int, advice: bool = True
    ) -> None:
        self.command = command
        self.table = table
        self.usage_exit = usage_exit
        self.advice = advice
        self.longs = {opt.long: opt for opt in table if opt.long}
        self.shorts = {opt.short: opt for opt in table if opt.short}

    def _error(self, text: str) -> CommandError:
        lines = [f"{self.command}: {text}"]
        if self.advice:
            lines.append(f'Try "{self.command} --help" for more information')
        return CommandError(*lines, exit_code=self.usage_exit)

    def _long(self, name: str, shown: str) -> Opt:
        exact = self.longs.get(name)
        if exact is not None:
            return exact
        found = [opt for long, opt in self.longs.items() if long.startswith(name)]
        if not found:
            raise self._error(f"unrecognized option '{shown}'")
        if len(found) > 1:
            names = " ".join(f"'--{opt.long}'" for opt in sorted(found, key=lambda o: o.long))
            raise self._error(f"option '{shown}' is ambiguous; possibilities: {names}")
        return found[0]

    def parse(
        self, argv: Iterable[str], *, permute: bool
    ) -> tuple[list[tuple[Opt, str | None]], list[str]]:
        """Options with their values in order, and the other arguments.

        Without ``permute`` the first argument that is no option ends the options (what follows
        belongs to the script or program).  Raises ``CommandError``.
        """
        words = list(argv)
        found: list[tuple[Opt, str | None]] = []
        rest: list[str] = []
        i = 0
        while i < len(words):
            word = words[i]
            i += 1
            if word == "--":
                rest += words[i:]
                break
            if word.startswith("--"):
                i = self._take_long(word, words, i, found)
            elif word.startswith("-") and len(word) > 1:
                i = self._take_short(word, words, i, found)
            else:
                rest.append(word)
                if not permute:
                    rest += words[i:]
                    break
        return found, rest

    def _take_long(
        self, word: str, words: list[str], i: int, found: list[tuple[Opt, str | None]]
    ) -> int:
        name, equals, value = word[2:].partition("=")
        opt = self._long(name, word)
        if equals:
            if opt.arg == NO:
                raise self._error(f"option '--{opt.long}' doesn't allow an argument")
            found.append((opt, value))
        elif opt.arg == REQUIRED:
            if i >= len(words):
                raise self._error(f"option '--{opt.long}' requires an argument")
            found.append((opt, words[i]))
            i += 1
        else:
            found.append((opt, None))
        return i

    def _take_short(
        self, word: str, words: list[str], i: int, found: list[tuple[Opt, str | None]]
    ) -> int:
        at = 1
        while at < len(word):
            letter = word[at]
            at += 1
            opt = self.shorts.get(letter)
            if opt is None:
                raise self._error(f"invalid option -- '{letter}'")
            if opt.arg == NO:
                found.append((opt, None))
                continue
            if at < len(word):
                found.append((opt, word[at:]))
            elif opt.arg == OPTIONAL:
                found.append((opt, None))
            elif i < len(words):
                found.append((opt, words[i]))
                i += 1
            else:
                raise self._error(f"option requires an argument -- '{letter}'")
            break
        return i

    def help_text(self, usage: str, about: str = "") -> str:
        """The text of ``--help``."""
        lines = [f"Usage: {usage}"]
        if about:
            lines += ["", about]
        lines.append("")
        for opt in self.table:
            if opt.kind not in ("", INERT) or not opt.help:
                continue
            left = f"-{opt.short}, " if opt.short else "    "
            left += f"--{opt.long}" if opt.long else ""
            if opt.arg == REQUIRED:
                left += f"={opt.metavar or 'value'}"
            elif opt.arg == OPTIONAL:
                left += f"[={opt.metavar or 'value'}]"
            lines.append(f"  {left:<34}  {opt.help}" if len(left) < 34 else f"  {left}")
            if len(left) >= 34:
                lines.append(" " * 38 + opt.help)
        return "\n".join(lines) + "\n"
