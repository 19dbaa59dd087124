"""The rules of words: one name for one thing, and docstrings that begin with a noun or a verb."""

import ast

from tests.project.layering import Modules, Rule

QUESTIONS = frozenset({"What", "Whether", "How", "Where", "Which", "When", "Why", "Who"})


def shared_class_names(modules: Modules) -> list[str]:
    """Classes whose name is that of another one: one word, one meaning."""
    found: dict[str, list[str]] = {}
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module.at(node, f"class {node.name}"))
    return [", ".join(places) for places in found.values() if len(places) > 1]


def shared_file_stems(modules: Modules) -> list[str]:
    """Files whose name is that of another one, whatever room they are in: a stranger asks for a file by its name."""
    found: dict[str, list[str]] = {}
    for module in modules.values():
        if not module.package:
            found.setdefault(module.name.rpartition(".")[2], []).append(module.file)
    return [", ".join(files) for files in found.values() if len(files) > 1]


def questions_for_docstrings(modules: Modules) -> list[str]:
    """Docstrings that begin with a question's word, and not with a noun or a verb."""
    found = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                first = (ast.get_docstring(node) or " ").split(" ")[0]
                if first in QUESTIONS:
                    found.append(
                        module.at(node, f"the docstring of {getattr(node, 'name', module.name)} begins with {first}")
                    )
    return found


RULES: tuple[Rule, ...] = (shared_class_names, shared_file_stems, questions_for_docstrings)
