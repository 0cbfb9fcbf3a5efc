"""A folder to the Hugging Face Hub."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from ..errors import InputError, RunError, first_line


def check_repo(repo: str) -> None:
    """Raise for what cannot be a repository's name, before any work."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(f'--push {repo}: {first_line(error)}') from None
    if repo.count('/') != 1:
        raise InputError(f'--push {repo}: expected USER/NAME')


def upload(folder: Path, repo: str, private: bool = False) -> str:
    """Create the repository if there is none and put the folder's files into it; returns its address."""
    api = HfApi(library_name='nprf_vit')
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message='Weights, configuration and model card')
    except Exception as error:  # no network, no login, no permission: each has a class of its own in each version
        raise RunError(
            f'cannot push to {repo}: {first_line(error)}; {folder} is complete, so `hf upload {repo} {folder}` '
            'does the rest'
        ) from error
    return str(url)
