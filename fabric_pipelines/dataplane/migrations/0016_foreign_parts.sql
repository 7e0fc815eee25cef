-- Rows of a foreign table lie on another server, and what is written to them there fires no trigger here; so a table of which
-- a partition or child is one is not believed either.
create or replace function fabric.is_unlogged(relation oid) returns boolean
language sql stable
as $$
    with recursive part (oid) as (
        select relation
        union
        select i.inhrelid from pg_inherits as i join part as p on i.inhparent = p.oid
    )
    select exists (select from pg_class as c join part using (oid) where c.relpersistence = 'u' or c.relkind = 'f')
$$;
