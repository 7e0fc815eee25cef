-- Old generations go by policy. The row stays, so that a number is never given twice and its receipt can say what became
-- of the bytes; the manifest goes where a receipt says the same. A pin lies in the row itself: an UPDATE that waited for
-- another looks at the row again, and only at the row.
alter table fabric.shard_generation
    add column pruned_at  timestamptz,
    add column pinned_at  timestamptz,
    add column pin_reason text,
    add constraint pinned_is_there check (pinned_at is null or pruned_at is null);
comment on column fabric.shard_generation.pruned_at is 'its bytes are gone or about to go, by policy; null: they are there';
comment on column fabric.shard_generation.pinned_at is 'kept whatever the policy says, with what a rebuild of it needs';

-- What a rebuild of a kept generation needs is its parent; of those that are not pinned only the newest counts.
create function fabric.generation_needed(shard text, number bigint) returns boolean
language sql stable
as $$
    select number >= coalesce(max(g.generation), 0)
        or coalesce(bool_or(
            (g.manifest -> 'increment' ->> 'parent_generation')::bigint = number
            and (g.pinned_at is not null
                 or g.generation = (select max(n.generation) from fabric.shard_generation as n where n.name = shard))),
            false)
        or exists (
            select from fabric.device_lease as d
            where d.name = shard and d.generation = number and d.expires > clock_timestamp())
    from fabric.shard_generation as g
    where g.name = shard
$$;

create function fabric.manifest_kept(shard text, number bigint, manifest jsonb) returns jsonb
language sql stable
as $$
    select case
        when exists (select from fabric.receipt as r where r.shard = manifest_kept.shard and r.generation = number)
        then '{}'::jsonb else manifest end
$$;
