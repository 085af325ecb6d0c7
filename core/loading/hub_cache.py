"""What the hub library keeps on this machine: models that were fetched by their hub id."""

from __future__ import annotations

from octavo.core.loading.sources import CachedModel


def hub_models() -> list[CachedModel]:
    """Every model in the hub's cache, whoever fetched it; the version is the newest commit's."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, OSError):
        return []
    entries = []
    for repo in sorted(found.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda revision: revision.last_modified)
        entries.append(
            CachedModel(repo.repo_id, newest.commit_hash[:12], repo.repo_path, repo.size_on_disk)
        )
    return entries


def remove_hub_model(name: str) -> list[CachedModel]:
    """Deletes a model's every revision from the hub's cache; [] when it is not there."""
    from huggingface_hub import constants, scan_cache_dir

    removed = [entry for entry in hub_models() if entry.name == name]
    if removed:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
        hashes = [
            revision.commit_hash
            for repo in cache.repos
            if repo.repo_type == "model" and repo.repo_id == name
            for revision in repo.revisions
        ]
        cache.delete_revisions(*hashes).execute()
    return removed
