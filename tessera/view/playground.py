"""The playground: values of a form become a call of its command, and the call a job."""

from __future__ import annotations

from tessera.run.directory import Json, is_file
from tessera.run.errors import UserError
from tessera.view.calls import Call
from tessera.view.forms import Field, Form, forms_of, parse_value
from tessera.view.jobs import Job
from tessera.view.library import RunLibrary
from tessera.view.runs import FoundRun
from tessera.view.storage import INPUTS, Storage, shown_path

ALWAYS_GIVEN = ("count", "seed", "top")
"""Fields whose default in a form may not be the default of the command."""


class Playground:
    def __init__(self, library: RunLibrary, storage: Storage):
        self.library, self.storage = library, storage

    def describe_forms(self, run: FoundRun) -> Json:
        return {
            "forms": [form.as_json() for form in forms_of(run, self.library)],
            "indexes": self.library.indexes(),
            "can_sample": run.has_checkpoint(),
            "is_kept": self.storage.is_kept(run),
        }

    def find_file_field(self, run: FoundRun, name: str) -> Field:
        for form in forms_of(run, self.library):
            for field in form.fields:
                if field.name == name and field.input == "file":
                    return field
        raise UserError(f"This run has no field {name!r} for a file.")

    def build_job(self, run: FoundRun, body: Json, job_id: str) -> Job:
        """Turn the values of a form into a call of its command."""
        if not run.has_checkpoint():
            raise UserError("This run has no complete checkpoint yet.")
        forms = {form.command: form for form in forms_of(run, self.library)}
        command, values = body.get("command"), body.get("values")
        if command not in forms or not isinstance(values, dict):
            raise UserError("The request names no form of this run.")
        form = forms[command]
        options, files = self.read_values(run, form, values)
        positional = self.positional_arguments(run, command, options)
        out = self.storage.new_folder(run, command)
        shown_out = shown_path(out) if command == "index" else None
        call = Call(command, positional, options, run.read_info().kind, shown_out)
        return Job(job_id, run.id, call, out, files, values)

    def read_values(self, run: FoundRun, form: Form, values: Json) -> tuple[Json, list[Json]]:
        """Return the arguments of the command, and the files among them with their modality."""
        options: Json = {}
        files: list[Json] = []
        for name, value in values.items():
            field = form.field(name)
            if value is None or value == "" or value == []:
                continue
            if field.input == "file":
                options[name] = self.find_input(run, value)
                files.append({"path": options[name], "modality": field.modality})
            else:
                options[name] = parse_value(field, value)
        for field in form.fields:
            if field.name in ALWAYS_GIVEN:
                options.setdefault(field.name, field.default)
        return options, files

    def find_input(self, run: FoundRun, value: object) -> str:
        """Return the path of an upload, or of a sample to start from."""
        value = value if isinstance(value, dict) else {}
        folder, name = value.get("folder"), value.get("name")
        if isinstance(value.get("upload"), str):
            folder, name = INPUTS, value["upload"]
        if not isinstance(folder, str) or not isinstance(name, str):
            raise UserError("A file must be uploaded first.")
        path = self.storage.find(run, folder, name)
        if path is None:
            raise UserError("There is no such file.")
        return str(path)

    def positional_arguments(self, run: FoundRun, command: str, options: Json) -> tuple[str, ...]:
        """Take the arguments without a flag out of the options."""
        if command == "search":
            recording = options.pop("query_file", None)
            query = options.pop("query", None)
            if (recording is None) == (query is None):
                raise UserError("Give either a text or a recording to search for.")
            if query is not None and is_file(query):  # which the command would open
                raise UserError("The text is the path of a file. Upload the recording instead.")
            if "index" not in options:
                raise UserError("Choose an index, or build one first.")
            return options.pop("index"), recording or query
        base, superres = options.pop("run", None), options.pop("superres", None)
        if base is not None:
            return shown_path(self.library.get(base).path), shown_path(run.path)
        if superres is not None:
            return shown_path(run.path), shown_path(self.library.get(superres).path)
        return (shown_path(run.path),)
